//! How streams and connections end that do not end well.

use std::{io, sync::Arc};

use super::Reason;

/// Why a call has no whole answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The peer reset the stream.
    #[error("the stream was reset by the other side: {0}")]
    Reset(Reason),
    /// The peer goes away, and has not begun with the call.
    #[error("the other side takes no more calls on this connection: {0}")]
    GoAway(Reason),
    /// The connection ended before the call was sent.
    #[error("the connection ended before the call was sent")]
    NotSent,
    /// The answer is no answer; its stream was reset, and the connection goes on.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
    /// The peer violated the protocol, and the connection was ended for it.
    #[error("the other side violated HTTP/2: {0}")]
    Violation(Violation),
    /// The peer hung up.
    #[error("the other side closed the connection")]
    Closed,
    /// Reading or writing failed.
    #[error("the connection broke: {0}")]
    Io(Arc<io::Error>),
    /// We ended the connection.
    #[error("the connection was given up")]
    Aborted,
}

/// What a peer did that it must not, and the code that it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{1} ({0})")]
pub struct Violation(pub Reason, pub &'static str);

impl From<Violation> for Error {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl Error {
    /// Whether the peer did not begin with the call, so that it may be sent again (RFC 9113, 8.7).
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Reset(Reason::REFUSED_STREAM) | Self::GoAway(_) | Self::NotSent)
    }

    /// The code with which the peer itself reset the stream.
    pub fn reset_reason(&self) -> Option<Reason> {
        if let Self::Reset(reason) = self { Some(*reason) } else { None }
    }
}
