//! State shared by all connections of the gateway.

use std::sync::{Arc, atomic::AtomicU64};

use rustls::ServerConfig;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Admission, Limits, connections::Connections, counted_stream::LinkBytes, downloads::Downloads,
    enrol::Enrolment, refusal_log::RefusalLog,
};

pub(super) struct Shared {
    pub(super) admission: Arc<dyn Admission>,
    pub(super) connections: Connections,
    pub(super) limits: Limits,
    pub(super) bytes: LinkBytes,
    pub(super) build_id: String,
    pub(super) enrolment: Enrolment,
    pub(super) enrol_tls: Arc<ServerConfig>,
    pub(super) cell_tls: Arc<ServerConfig>,
    /// `None` without a program or without TCP.
    pub(super) downloads: Option<Downloads>,
    pub(super) log: Arc<RefusalLog>,
    /// Numbers the accepted connections.
    pub(super) sequence: AtomicU64,
    pub(super) shutdown: CancellationToken,
    pub(super) tasks: TaskTracker,
}
