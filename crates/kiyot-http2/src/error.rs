//! Errors of streams and connections.

use std::{io, sync::Arc};

use super::Reason;

/// Failure of a stream or of its connection.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The peer has reset the stream.
    #[error("stream reset by the peer: {0}")]
    Reset(Reason),
    /// The peer has sent GOAWAY, and has not begun to process the stream.
    #[error("peer takes no new streams: {0}")]
    GoAway(Reason),
    /// The connection ended before the request was sent.
    #[error("connection ended before the request was sent")]
    NotSent,
    /// The message is malformed. Its stream is reset, and the connection stays.
    #[error("malformed message: {0}")]
    Malformed(&'static str),
    /// The peer has violated HTTP/2, which ends the connection.
    #[error("peer violated HTTP/2: {0}")]
    Violation(Violation),
    /// The peer has closed the connection.
    #[error("peer closed the connection")]
    Closed,
    /// Reading or writing the socket has failed.
    #[error("connection failed: {0}")]
    Io(Arc<io::Error>),
    /// This side has ended the stream or the connection.
    #[error("connection aborted")]
    Aborted,
}

/// Violation of HTTP/2 by a peer: the error code, and a text for the GOAWAY.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{1} ({0})")]
pub struct Violation(pub Reason, pub &'static str);

impl From<Violation> for Error {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl Error {
    /// Returns whether the peer has not begun to process the request, so that it may be sent again
    /// (RFC 9113, 8.7).
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Reset(Reason::REFUSED_STREAM) | Self::GoAway(_) | Self::NotSent)
    }

    /// Returns the code of the peer's RST_STREAM.
    pub fn reset_reason(&self) -> Option<Reason> {
        if let Self::Reset(reason) = self { Some(*reason) } else { None }
    }
}
