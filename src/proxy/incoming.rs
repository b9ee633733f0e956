//! A request as it comes in.

use std::{future::poll_fn, task::Poll, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{Request, header::CONTENT_LENGTH, request::Parts};
use kiyot_http2::RecvStream;

use super::{
    frame::{self, Frame},
    idle_timeout::IdleTimeout,
};

/// What is taken of a body before anything else is known of it. Bytes.
const MAX_AVAILABLE_BYTES: usize = 64 << 10;

/// A request, and as much of its body as was looked at.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Its metadata.
    pub(super) head: Parts,
    /// The body, as far as it was read.
    pub(super) body: Bytes,
    /// What is still to come; `None` if `body` is all.
    pub(super) rest: Option<RecvStream>,
    /// How long the caller may send nothing of a body that it began.
    pub(super) idle_timeout: Option<Duration>,
}

/// What the body begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FirstMessage {
    /// A whole message; it is `body[frame::HEADER_BYTES..][..length]`.
    Complete {
        /// Length of the message.
        length: usize,
        /// Whether it is compressed.
        compressed: bool,
        /// Whether nothing came behind it.
        alone: bool,
    },
    /// It ended before a message was whole.
    Absent,
}

/// There will be no message.
#[derive(Debug)]
pub(super) enum MessageError {
    /// The caller has cancelled the call.
    Cancelled,
    /// The caller stopped in the middle of the request.
    Idle(Duration),
    /// The message is larger than is allowed.
    TooLarge(usize),
}

impl Incoming {
    /// A request of which nothing was read yet.
    pub(super) fn new(request: Request<RecvStream>, idle_timeout: Option<Duration>) -> Self {
        let (head, rest) = request.into_parts();
        let rest = (!rest.is_end_stream()).then_some(rest);
        Self { head, body: Bytes::new(), rest, idle_timeout }
    }

    /// Takes what has come already of the body, up to a limit: with most calls that is all of it,
    /// so that it may be sent again.
    pub(super) async fn read_available(&mut self) -> Result<(), MessageError> {
        while self.body.len() < MAX_AVAILABLE_BYTES {
            let Some(rest) = &mut self.rest else { return Ok(()) };
            match poll_fn(|cx| Poll::Ready(rest.poll_data(cx))).await {
                Poll::Ready(Some(Ok(part))) => self.append(part),
                Poll::Ready(Some(Err(_))) => return Err(MessageError::Cancelled),
                // An end of its own may have trailers: left to whoever reads on.
                Poll::Ready(None) | Poll::Pending => return Ok(()),
            }
        }
        Ok(())
    }

    /// Reads until the body has a whole message.
    pub(super) async fn read_message(&mut self) -> Result<FirstMessage, MessageError> {
        let mut idle = IdleTimeout::new(self.idle_timeout);
        self.read_available().await?;
        loop {
            match (frame::parse(&self.body), &mut self.rest) {
                (Frame::TooLarge(length), _) => return Err(MessageError::TooLarge(length)),
                (Frame::Complete { length, compressed }, _) => {
                    // Its end may be behind it, in a frame of its own.
                    self.read_available().await?;
                    return Ok(FirstMessage::Complete {
                        length,
                        compressed,
                        alone: self.body.len() == frame::HEADER_BYTES + length,
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
            // The buffer is this request's alone: no copy of what it has already, and room is
            // doubled as it grows.
            let mut joined = BytesMut::from(std::mem::take(&mut self.body));
            joined.extend_from_slice(&part);
            self.body = joined.freeze();
        }
    }

    /// Puts another message into the place of the one of this length that [`Self::read_message`] found.
    pub(super) fn replace_message(&mut self, length: usize, message: &[u8]) {
        let behind = self.body.split_off(frame::HEADER_BYTES + length);
        self.body = [&frame::header(message.len()), message, &behind].concat().into();
        self.head.headers.remove(CONTENT_LENGTH);
    }

    /// The message that [`Self::read_message`] found.
    pub(super) fn message_bytes(&self, length: usize) -> Bytes {
        self.body.slice(frame::HEADER_BYTES..frame::HEADER_BYTES + length)
    }
}
