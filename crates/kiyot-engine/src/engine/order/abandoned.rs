//! Abandoned orders: no call waits, because the kubelet gave up, or the pod was changed or deleted.
//!
//! Before its attachment, a cell has nothing of its pod. It joins a warm pool that lacks a cell and
//! has its offering; otherwise it ends.

use std::{sync::Arc, time::Duration};

use crate::engine::cell::timeline;

use crate::{
    engine::{
        CellError, CellEvent, CommitOf, Effect, Engine, Notice, Now, State, Step, timers::Timer,
    },
    id::{CellId, SandboxId},
    placement::Candidate,
    wanted::OrderKey,
};

/// The time within which a call must join an abandoned order. A kubelet repeats a call within 15 s.
const ABANDONED_TIMEOUT: Duration = Duration::from_secs(180);

/// The end reason of an order that stayed abandoned.
const ABANDONED: &str = "no call of the kubelet waited for the cell for three minutes";

impl Engine {
    pub(in crate::engine) fn on_joined(&mut self, key: &OrderKey) {
        let mut orders = self.orders.iter_mut();
        if let Some((sandbox, order)) = orders.find(|(_, order)| order.wanted.key == *key) {
            order.is_joined = true;
            self.timers.clear(&Timer::Abandoned(sandbox.clone()));
        }
    }

    pub(in crate::engine) fn on_abandoned(&mut self, key: &OrderKey, now: Now) {
        let mut orders = self.orders.iter_mut();
        if let Some((sandbox, order)) = orders.find(|(_, order)| order.wanted.key == *key) {
            order.is_joined = false;
            let sandbox = sandbox.clone();
            self.limit_abandoned(&sandbox, now);
        }
    }

    /// Limits the time of an order that no call waits for.
    pub(in crate::engine) fn limit_abandoned(&mut self, sandbox: &SandboxId, now: Now) {
        let Some(order) = self.orders.get(sandbox) else { return };
        let timer = Timer::Abandoned(sandbox.clone());
        if order.is_joined {
            self.timers.clear(&timer);
        } else {
            self.timers.set_once(timer, now.boot + ABANDONED_TIMEOUT);
        }
    }

    /// Ends an order that no call has joined in time. A cell that is being attached goes on: a
    /// later call can take over the sandbox.
    pub(in crate::engine) fn on_abandoned_timeout(&mut self, sandbox: &SandboxId, now: Now) {
        let Some(order) = self.orders.get(sandbox) else { return };
        match order.state.cell().cloned() {
            None => self.answer_order(None, sandbox, Err(CellError::Replaced(ABANDONED))),
            Some(cell) => {
                let cell_state = self.cells.get(&cell).map(|cell| &cell.state);
                if !matches!(cell_state, Some(State::Binding { .. })) {
                    self.release(&cell, ABANDONED, now);
                }
            }
        }
    }

    /// Answers the order of a cell. The cell parts from the order, and joins a warm pool or ends.
    pub(in crate::engine) fn release(&mut self, id: &CellId, reason: &str, now: Now) {
        let pool = self.lacking_pool(id);
        let order = self.cells.get(id).and_then(|cell| cell.order.waiting().cloned());
        let order = order.filter(|order| self.cell_of_order(order) == Some(id));
        if let Some(order) = order {
            let error = CellError::Ended(id.clone(), reason.to_owned());
            self.answer_order(Some(id), &order, Err(error));
        }
        match pool {
            Some(pool) => self.join_pool(id, pool, now),
            None => self.apply(id, CellEvent::End(reason.into()), now),
        }
    }

    /// Returns a pool that lacks a cell and has all offerings that the cell may have. No pool takes
    /// a cell that was attached, has failed, was launched with parameters of its pod, or belongs to
    /// a draining provider. No pool takes any cell while launches are stopped.
    pub(in crate::engine) fn lacking_pool(&self, id: &CellId) -> Option<Arc<str>> {
        let cell = self.cells.get(id)?;
        let is_fresh = matches!(
            cell.state,
            State::Launching { .. } | State::Booting { .. } | State::Idle { .. }
        );
        if !is_fresh
            || cell.pool.is_some()
            || cell.end.failure.is_some()
            || cell.end.is_by_caller()
            || self.is_cordoned
            || self.is_draining(cell)
            || !self.has_parameters_of_pools(cell)
        {
            return None;
        }
        let candidates: Vec<_> = match cell.offering() {
            Some(offering) => vec![offering],
            None => cell.launch.candidates().collect(),
        };
        let mut pools = self.pools.by_name.iter().filter(|_| !candidates.is_empty());
        let pool = pools.find(|(name, pool)| {
            let has =
                |one: &&Candidate| pool.candidates.iter().any(|of| of.offering == one.offering);
            candidates.iter().all(has) && self.warm_cells(name) < pool.count
        });
        pool.map(|(name, _)| Arc::clone(name))
    }

    /// Adds a cell without an order to a warm pool.
    fn join_pool(&mut self, id: &CellId, pool: Arc<str>, now: Now) {
        // The time until now is billed to the namespace.
        let cost = self.settle_cost(id, now);
        let Some(cell) = self.cells.get_mut(id) else { return };
        cell.bill.restart(cost, now);
        cell.created_unix_nanos = timeline::nanos(now.unix);
        cell.requested = Some(now.boot);
        let before = std::mem::take(&mut cell.timeline);
        for step in [Step::Launched, Step::Booted, Step::Enrolled] {
            if before.at(step).is_some() {
                cell.timeline.reach(step, now.unix);
            }
        }
        // The cell's commits remove the record of the order.
        cell.order.part();
        cell.pod = None;
        cell.pool = Some(Arc::clone(&pool));
        let is_idle = matches!(cell.state, State::Idle { .. });
        // The launch is recorded, and may have been called even if this commit fails.
        let is_launching = matches!(cell.state, State::Launching { .. });
        let of = if is_launching { CommitOf::Information } else { CommitOf::State };
        self.emit(id, Effect::Log(Notice::JoinedPool(pool)));
        self.commit(id, of, now);
        let at = now.boot + self.config.launch_timeout;
        self.timers.set(Timer::Warm(id.clone()), at);
        self.settle_health(id, now);
        if is_idle {
            self.on_warm(id, now);
        } else {
            self.wake_waiting_orders(now);
        }
    }
}
