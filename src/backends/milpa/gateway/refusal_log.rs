//! Rate limits for the log lines that a peer can cause before its connection is admitted.

use kiyot_engine::id::CellId;
use kiyot_link::log_limit::{LogLimit, LogLimits};

/// A rate limit for each kind of line, so that lines which any peer can cause suppress no others.
#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    /// Connections above the limit of unauthenticated ones.
    pub(super) conn_limit: LogLimit,
    /// Errors of `accept`.
    pub(super) accept: LogLimit,
    /// Handshakes that failed or timed out.
    pub(super) handshake: LogLimit,
    /// Certificates that have expired by this node's clock.
    pub(super) expiry: LogLimit,
    /// Connections with a certificate that were not admitted.
    pub(super) admission: LogLimit,
    /// Enrolments that were refused.
    pub(super) enrolment: LogLimit,
    /// Downloads of the agent program with a wrong token.
    pub(super) download: LogLimit,
    /// Enrolments of cells that have ended or are being ended.
    pub(super) ended: LogLimit,
    /// Enrolments that failed in the store or the certificate authority.
    pub(super) failure: LogLimit,
    /// Tokens presented with a second key, by the token's cell: an alarm, which events of other
    /// cells must not suppress.
    pub(super) token_reuse: LogLimits<CellId>,
    /// Certificates that were issued, by cell.
    pub(super) certificate: LogLimits<CellId>,
}
