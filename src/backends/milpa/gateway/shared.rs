//! What all connections of the gateway share.

use std::sync::{Arc, atomic::AtomicU64};

use rustls::ServerConfig;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Ledger, Limits, enrol::Enrolment, newcomers::Newcomers, refusal_log::RefusalLog, slots::Slots,
};

/// What all connections share.
pub(super) struct Shared {
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) slots: Slots,
    pub(super) limits: Limits,
    pub(super) build_id: String,
    pub(super) enrolment: Enrolment,
    pub(super) enrol_tls: Arc<ServerConfig>,
    pub(super) cell_tls: Arc<ServerConfig>,
    pub(super) newcomers: Newcomers,
    pub(super) log: Arc<RefusalLog>,
    pub(super) arrivals: AtomicU64,
    pub(super) end: CancellationToken,
    pub(super) tasks: TaskTracker,
}
