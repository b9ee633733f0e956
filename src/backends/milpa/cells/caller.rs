//! Calls that wait for the cell of an order.

use std::{collections::hash_map::Entry, sync::Arc};

use kiyot_engine::{OrderKey, engine::Event};

use super::shared::{Core, Shared};

/// A call that waits, until it is dropped, for the cell of an order. An order without calls is
/// abandoned: its cell may join a warm pool, and ends after three minutes.
#[derive(Debug)]
pub(crate) struct Caller {
    shared: Arc<Shared>,
    order: OrderKey,
}

impl Caller {
    pub(super) fn new(shared: &Arc<Shared>, order: OrderKey) -> Self {
        shared.with_core(|core, now| {
            let callers = core.callers.entry(order.clone()).or_default();
            *callers += 1;
            ((), core.engine.handle(Event::Joined(order.clone()), now))
        });
        Self { shared: Arc::clone(shared), order }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // A stopping daemon leaves its launches to the next daemon.
        if self.shared.stop.is_cancelled() {
            return;
        }
        self.shared.with_core(|core, now| {
            let event = if leaves_last(core, &self.order) {
                Event::Abandoned(self.order.clone())
            } else {
                Event::Tick
            };
            ((), core.engine.handle(event, now))
        });
    }
}

/// Removes a caller of an order. Returns whether it was the last.
fn leaves_last(core: &mut Core, order: &OrderKey) -> bool {
    let Entry::Occupied(mut callers) = core.callers.entry(order.clone()) else { return true };
    *callers.get_mut() = callers.get().saturating_sub(1);
    let is_last = *callers.get() == 0;
    if is_last {
        callers.remove();
    }
    is_last
}
