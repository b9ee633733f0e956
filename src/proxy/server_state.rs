//! State that all calls share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kiyot_config::{Routing, Server};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::id_cache::IdCache;
use crate::{
    backends::{Method, registry::Registry},
    metrics::{CallRecord, CriCalls},
};

/// Settings that a reload changes. A call keeps the settings with which it began.
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

/// State that all calls share.
#[derive(Debug)]
pub(super) struct ServerState {
    pub(super) registry: Registry,
    /// Used only if several container runtimes make ids.
    pub(super) id_cache: IdCache,
    /// The tokio runtime on which decoded calls are answered.
    pub(super) main: Handle,
    pub(super) open_calls: AtomicUsize,
    /// Counters of calls; `None` counts nothing.
    pub(super) calls: Option<Arc<CriCalls>>,
    /// Cancelled when no new calls are accepted. Endless streams end then.
    pub(super) drain: CancellationToken,
}

/// Guard that counts an open call.
#[derive(Debug)]
pub(super) struct OpenCall(Arc<ServerState>);

impl ServerState {
    /// Counts a call; `None` if `max_calls` are open already.
    pub(super) fn open_call(self: &Arc<Self>, max_calls: usize) -> Option<OpenCall> {
        let before = self.open_calls.fetch_add(1, Ordering::Relaxed);
        let open = OpenCall(self.clone());
        (before < max_calls).then_some(open)
    }

    /// Begins to measure a call; `None` stands for a method that CRI lacks.
    pub(super) fn record(&self, method: Option<Method>) -> CallRecord {
        let begin = |calls: &Arc<CriCalls>| calls.begin(method.map(|method| method as usize));
        self.calls.as_ref().map_or_else(CallRecord::off, begin)
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.open_calls.fetch_sub(1, Ordering::Relaxed);
    }
}
