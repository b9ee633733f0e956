//! Reading of requests.

use std::{future::poll_fn, task::Poll, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{Request, header::CONTENT_LENGTH, request::Parts};
use kiyot_http2::RecvStream;

use super::{
    cell_guard::CellGuard,
    frame::{self, Frame},
    idle_timeout::IdleTimeout,
};

/// Bound on the bytes of a body that are read before its message is known.
const MAX_AVAILABLE_BYTES: usize = 64 << 10;

/// A request whose body is partly read.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Method, URI and headers.
    pub(super) head: Parts,
    /// The part of the body that was read.
    pub(super) body: Bytes,
    /// The rest of the body; `None` if `body` is all of it.
    pub(super) rest: Option<RecvStream>,
    /// Limit on each wait for more of an incomplete body.
    pub(super) idle_timeout: Option<Duration>,
    /// Holds back the beginning of `rest`.
    pub(super) guard: Option<Box<CellGuard>>,
}

/// The first message of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FirstMessage {
    /// A complete message: `body[frame::HEADER_BYTES..][..length]`.
    Complete {
        /// Bytes of the message.
        length: usize,
        /// The message is compressed.
        compressed: bool,
        /// No data followed the message.
        is_only: bool,
    },
    /// The body ended before its first message was complete.
    Absent,
}

/// A message that can't be read.
#[derive(Debug)]
pub(super) enum MessageError {
    /// The caller has cancelled the call.
    Cancelled,
    /// The caller sent nothing for this long.
    Idle(Duration),
    /// The message has this many bytes, which is too large.
    TooLarge(usize),
}

impl Incoming {
    /// Wraps a request whose body is unread.
    pub(super) fn new(request: Request<RecvStream>, idle_timeout: Option<Duration>) -> Self {
        let (head, rest) = request.into_parts();
        let rest = (!rest.is_end_stream()).then_some(rest);
        Self { head, body: Bytes::new(), rest, idle_timeout, guard: None }
    }

    /// Reads the available part of the body, up to [`MAX_AVAILABLE_BYTES`]. Most bodies are
    /// complete then, so that their calls can be retried.
    pub(super) async fn read_available(&mut self) -> Result<(), MessageError> {
        while self.body.len() < MAX_AVAILABLE_BYTES {
            let Some(rest) = &mut self.rest else { return Ok(()) };
            match poll_fn(|cx| Poll::Ready(rest.poll_data(cx))).await {
                Poll::Ready(Some(Ok(part))) => self.append(part),
                Poll::Ready(Some(Err(_))) => return Err(MessageError::Cancelled),
                // The end may have trailers, which the next reader takes.
                Poll::Ready(None) | Poll::Pending => return Ok(()),
            }
        }
        Ok(())
    }

    /// Reads until the first message is complete.
    pub(super) async fn read_message(&mut self) -> Result<FirstMessage, MessageError> {
        let mut idle = IdleTimeout::new(self.idle_timeout);
        self.read_available().await?;
        loop {
            match (frame::parse(&self.body), &mut self.rest) {
                (Frame::TooLarge(length), _) => return Err(MessageError::TooLarge(length)),
                (Frame::Complete { length, compressed }, _) => {
                    // The end of the stream may be in an HTTP/2 frame of its own.
                    self.read_available().await?;
                    return Ok(FirstMessage::Complete {
                        length,
                        compressed,
                        is_only: self.body.len() == frame::HEADER_BYTES + length,
                    });
                }
                (Frame::Partial, None) => return Ok(FirstMessage::Absent),
                (Frame::Partial, Some(rest)) => {
                    let part = poll_fn(|cx| match rest.poll_data(cx) {
                        Poll::Ready(part) => Poll::Ready(Ok(part)),
                        Poll::Pending => idle.poll(cx).map(Err),
                    });
                    match part.await {
                        Ok(Some(Ok(part))) => {
                            idle.reset();
                            self.append(part);
                        }
                        Ok(Some(Err(_))) => return Err(MessageError::Cancelled),
                        // Trailers of a request have no meaning in gRPC.
                        Ok(None) => self.rest = None,
                        Err(limit) => return Err(MessageError::Idle(limit)),
                    }
                }
            }
        }
    }

    fn append(&mut self, part: Bytes) {
        self.rest = self.rest.take().filter(|rest| !rest.is_end_stream());
        if self.body.is_empty() {
            self.body = part;
        } else if !part.is_empty() {
            // The buffer has no other owner: its bytes are not copied, and its capacity is doubled.
            let mut joined = BytesMut::from(std::mem::take(&mut self.body));
            joined.extend_from_slice(&part);
            self.body = joined.freeze();
        }
    }

    /// Replaces the message of this length that [`Self::read_message`] found.
    pub(super) fn replace_message(&mut self, length: usize, message: &[u8]) {
        let behind = self.body.split_off(frame::HEADER_BYTES + length);
        self.body = [&frame::header(message.len()), message, &behind].concat().into();
        self.head.headers.remove(CONTENT_LENGTH);
    }

    /// Returns the message that [`Self::read_message`] found.
    pub(super) fn message_bytes(&self, length: usize) -> Bytes {
        self.body.slice(frame::HEADER_BYTES..frame::HEADER_BYTES + length)
    }
}
