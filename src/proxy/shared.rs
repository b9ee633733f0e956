//! What all calls share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::runtime::Handle;

use crate::{backends::registry::Registry, config::Routing};

/// What all calls share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) registry: Registry,
    pub(super) routing: Routing,
    /// The runtime on which decoded calls are answered.
    pub(super) main: Handle,
    pub(super) client_timeout: Duration,
    pub(super) max_calls: usize,
    pub(super) open_calls: AtomicUsize,
}

/// One of the calls that are open.
#[derive(Debug)]
pub(super) struct OpenCall(Arc<Shared>);

impl Shared {
    /// Counts a call; `None` if there are as many as there may be.
    pub(super) fn open_call(self: &Arc<Self>) -> Option<OpenCall> {
        let before = self.open_calls.fetch_add(1, Ordering::Relaxed);
        let open = OpenCall(self.clone());
        (before < self.max_calls).then_some(open)
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.open_calls.fetch_sub(1, Ordering::Relaxed);
    }
}
