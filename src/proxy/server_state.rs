//! What all calls share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::id_cache::IdCache;
use crate::{
    backends::registry::Registry,
    config::{Routing, Server},
};

/// What may change while the daemon runs. A call goes by what was set when it came.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) routing: Routing,
    pub(super) client_timeout: Duration,
    pub(super) max_calls: usize,
}

impl Settings {
    pub(super) fn new(server: &Server, routing: Routing) -> Self {
        Self {
            routing,
            client_timeout: server.client_timeout,
            max_calls: server.max_concurrent_calls,
        }
    }
}

/// What all calls share.
#[derive(Debug)]
pub(super) struct ServerState {
    pub(super) registry: Registry,
    /// IdCache of ids; used only where several container runtimes make them.
    pub(super) id_cache: IdCache,
    /// The runtime on which decoded calls are answered.
    pub(super) main: Handle,
    pub(super) open_calls: AtomicUsize,
    /// Cancelled when there are no new calls any more. What has no end by itself ends then.
    pub(super) drain: CancellationToken,
}

/// One of the calls that are open.
#[derive(Debug)]
pub(super) struct OpenCall(Arc<ServerState>);

impl ServerState {
    /// Counts a call; `None` if there are as many as there may be.
    pub(super) fn open_call(self: &Arc<Self>, most: usize) -> Option<OpenCall> {
        let before = self.open_calls.fetch_add(1, Ordering::Relaxed);
        let open = OpenCall(self.clone());
        (before < most).then_some(open)
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.open_calls.fetch_sub(1, Ordering::Relaxed);
    }
}
