//! The lines of the log that a peer can cause before its connection is let in.

use kiyot_link::log_limit::{LogLimit, LogLimits};

use crate::backends::milpa::id::CellId;

/// A limit for each kind of line, so that what anybody can cause suppresses nothing else.
#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    /// Connections beyond the limit of those that are not let in yet.
    pub(super) excess: LogLimit,
    /// Connections that the kernel did not give.
    pub(super) accept: LogLimit,
    /// Handshakes that failed or took too long.
    pub(super) handshake: LogLimit,
    /// Certificates that have ended by this node's clock.
    pub(super) clock: LogLimit,
    /// Connections with a certificate that were not let in.
    pub(super) connection: LogLimit,
    /// Enrolments that were refused.
    pub(super) enrolment: LogLimit,
    /// Enrolments that the store or the certificate authority failed.
    pub(super) failure: LogLimit,
    /// Tokens that were shown with another key, by the cell whose tokens they are: an alarm, which
    /// nothing that happens to other cells suppresses.
    pub(super) forgery: LogLimits<CellId>,
    /// Certificates that were made, by the cell.
    pub(super) certificate: LogLimits<CellId>,
}
