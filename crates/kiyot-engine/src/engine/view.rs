//! Cells, orders and pools as operators see them.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kiyot_values::{error_chain::error_chain, price::Cost};

use crate::{
    engine::{
        Engine, Now, State, Timeline,
        cell::{Cell, earlier::EarlierLaunches, timeline},
        order::Order,
        pools,
    },
    id::{CellId, SandboxId},
    placement::Candidate,
    provider::ProviderError,
    wanted::OrderKey,
};

/// A cell whose end is not proven.
#[derive(Debug, Clone)]
pub struct CellView {
    /// The cell.
    pub id: CellId,
    /// Its provider; `None` for an older daemon's cell in a place where no provider looks.
    pub provider: Option<Arc<str>>,
    /// Its state.
    pub state: State,
    /// The offering of its instance, once the launch is answered.
    pub offering: Option<Candidate>,
    /// The pod's addresses, while the cell is bound.
    pub addresses: Vec<IpAddr>,
    /// The time of its creation, in nanoseconds since 1970.
    pub created_unix_nanos: i64,
    /// The steps of its start.
    pub timeline: Timeline,
    /// The namespace of its pod; `None` in a warm pool.
    pub namespace: Option<String>,
    /// The uid of its pod; `None` in a warm pool.
    pub pod_uid: Option<String>,
    /// The sandbox of its pod; `None` in a warm pool.
    pub sandbox: Option<String>,
    /// The warm pool that it was launched for.
    pub pool: Option<Arc<str>>,
    /// The error of its last launch or termination.
    pub error: Option<String>,
    /// The number of replays of its launch.
    pub replays: u32,
    /// The reason for its offering, once the launch is answered.
    pub offering_reason: Option<String>,
    /// The launches of the same order that failed before it.
    pub earlier: EarlierLaunches,
    /// The end of its console, if it was read.
    pub console: Option<String>,
    /// The time at which it was given up because its agent was silent for too long, in nanoseconds
    /// since 1970.
    pub lost_unix_nanos: Option<i64>,
    /// The cost since its launch.
    pub cost: Cost,
}

/// A pod that waits for its cell.
#[derive(Debug, Clone)]
pub struct OrderView {
    /// The id of the pod's sandbox.
    pub sandbox: SandboxId,
    /// The pod.
    pub key: OrderKey,
    /// The cell that is launched for it; `None` while the order waits.
    pub cell: Option<CellId>,
    /// The time since which the pod waits, in nanoseconds since 1970.
    pub since_unix_nanos: i64,
    /// The number of launches that failed.
    pub failures: u32,
    /// True if a launch on spot failed.
    pub spot_failed: bool,
    /// The error of the last launch that failed.
    pub last_error: Option<String>,
}

/// A warm pool.
#[derive(Debug, Clone)]
pub struct PoolView {
    /// Its identity.
    pub name: Arc<str>,
    /// The cells that it should have.
    pub wanted: usize,
    /// The cells that wait for a pod.
    pub idle: usize,
    /// The cells that boot.
    pub booting: usize,
    /// The orders that got a cell of the pool since the daemon started.
    pub hits: u64,
    /// The orders that the pool suits, but that got a new cell because no idle cell suited.
    pub misses: u64,
}

impl Cell {
    fn view(&self, provider: Option<Arc<str>>, now: Now) -> CellView {
        let addresses = match &self.state {
            State::Bound { addresses, .. } => addresses.clone(),
            _ => Vec::new(),
        };
        let launch_error = self.state.open_launch().and_then(|launch| launch.error.as_ref());
        let failure = self.end.failure.as_ref().map(|failure| error_chain(failure));
        let end = self.state.end();
        let error = end.and_then(|end| end.refusal.as_ref()).or(launch_error);
        let pod = self.pod.as_ref();
        CellView {
            id: self.id.clone(),
            provider,
            state: self.state.clone(),
            offering: self.offering().cloned(),
            addresses,
            created_unix_nanos: self.created_unix_nanos,
            timeline: self.timeline,
            namespace: pod.map(|pod| pod.namespace.clone()),
            pod_uid: pod.map(|pod| pod.uid.clone()),
            sandbox: pod.map(|pod| pod.sandbox.clone()),
            pool: self.pool.clone(),
            error: failure.or_else(|| error.map(ProviderError::text)),
            replays: self.launch.replays,
            offering_reason: self.offered.as_ref().map(|offered| offered.reason.clone()),
            earlier: self.earlier.clone(),
            console: end.and_then(|end| end.console.clone()),
            lost_unix_nanos: self.end.lost_unix_nanos,
            cost: self.cost(now),
        }
    }
}

impl Order {
    fn view(&self, sandbox: &SandboxId, now: Now) -> OrderView {
        let waits = now.boot.saturating_sub(self.queued_since);
        OrderView {
            sandbox: sandbox.clone(),
            key: self.wanted.key.clone(),
            cell: self.state.cell().cloned(),
            since_unix_nanos: timeline::nanos(now.unix.saturating_sub(waits)),
            failures: u32::try_from(self.causes.len()).unwrap_or(u32::MAX),
            spot_failed: self.spot_failed,
            last_error: self.causes.last().cloned(),
        }
    }
}

impl Engine {
    /// Returns a cell.
    pub fn cell_view(&self, id: &CellId, now: Now) -> Option<CellView> {
        let cell = self.cells.get(id)?;
        let by_place = || Some(self.providers.of(cell)?.key().into());
        Some(cell.view(cell.provider.clone().or_else(by_place), now))
    }

    /// Returns the pods that wait for their cells.
    pub fn order_views(&self, now: Now) -> Vec<OrderView> {
        self.orders.iter().map(|(sandbox, order)| order.view(sandbox, now)).collect()
    }

    /// Returns the warm pools, in one pass over the cells.
    pub fn pool_views(&self) -> Vec<PoolView> {
        let mut pools = BTreeMap::new();
        for (name, filling) in &self.pools.by_name {
            let pool = PoolView {
                name: Arc::clone(name),
                wanted: filling.count,
                idle: 0,
                booting: 0,
                hits: filling.hits,
                misses: filling.misses,
            };
            pools.insert(name, pool);
        }
        for cell in self.cells.values() {
            let Some(pool) = cell.warm_in().and_then(|pool| pools.get_mut(pool)) else { continue };
            let count = if pools::is_idle(cell) { &mut pool.idle } else { &mut pool.booting };
            *count += 1;
        }
        pools.into_values().collect()
    }

    /// Stops launches, or permits them again. When launches stop, begun launches for pods go on,
    /// and cells of warm pools end.
    pub fn set_cordoned(&mut self, is_cordoned: bool, now: Now) -> super::Effects {
        self.is_cordoned = is_cordoned;
        self.drain_pools(now);
        self.handle(super::Event::Tick, now)
    }

    /// Stops launches from the start of the daemon. Cells of warm pools end when the pools are set.
    pub fn start_cordoned(&mut self) {
        self.is_cordoned = true;
    }

    /// Returns whether an operator has stopped launches.
    pub fn is_cordoned(&self) -> bool {
        self.is_cordoned
    }
}
