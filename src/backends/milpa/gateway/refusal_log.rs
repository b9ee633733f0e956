//! Rate limits for log lines that a peer can cause before its connection is admitted.

use kiyot_engine::id::CellId;
use kiyot_link::log_limit::{LogLimit, LogLimits};

/// A rate limit for each kind of line, so that lines from any peer suppress no other kind.
#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    /// Connections above the unauthenticated limit.
    pub(super) conn_limit: LogLimit,
    /// Errors of `accept`.
    pub(super) accept: LogLimit,
    /// Handshakes that failed or timed out.
    pub(super) handshake: LogLimit,
    /// Certificates that have expired by this node's clock.
    pub(super) expiry: LogLimit,
    /// Connections with a certificate that is not admitted.
    pub(super) admission: LogLimit,
    /// Refused enrolments.
    pub(super) enrolment: LogLimit,
    /// Downloads of the agent program with a wrong token.
    pub(super) download: LogLimit,
    /// Enrolments of cells that have ended or are being ended.
    pub(super) ended: LogLimit,
    /// Enrolments that failed in the store or the certificate authority.
    pub(super) failure: LogLimit,
    /// Tokens presented with a second key, by the token's cell: an alarm, which other cells' events
    /// must not suppress.
    pub(super) token_reuse: LogLimits<CellId>,
    /// Issued certificates, by cell.
    pub(super) certificate: LogLimits<CellId>,
}
