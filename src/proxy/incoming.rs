//! A request as it comes in.

use std::{future::poll_fn, task::Poll, time::Duration};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::{Request, request::Parts};

use super::{
    frame::{self, Body},
    stall::Stall,
};

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
    pub(super) limit: Option<Duration>,
}

/// What the body begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// A whole message; it is `body[frame::HEAD..][..length]`.
    Whole {
        /// Length of the message.
        length: usize,
        /// Whether it is compressed.
        compressed: bool,
        /// Whether nothing came behind it.
        alone: bool,
    },
    /// It ended before a message was whole.
    None,
}

/// There will be no message.
#[derive(Debug)]
pub(super) enum NoMessage {
    /// The caller has cancelled the call.
    Cancelled,
    /// The caller stopped in the middle of the request.
    Stalled(Duration),
    /// The message is larger than is allowed.
    TooLarge(usize),
}

impl Incoming {
    /// A request of which nothing was read yet.
    pub(super) fn new(request: Request<RecvStream>, limit: Option<Duration>) -> Self {
        let (head, rest) = request.into_parts();
        let rest = (!rest.is_end_stream()).then_some(rest);
        Self { head, body: Bytes::new(), rest, limit }
    }

    /// Takes the first part of the body if it has come already, as it has with most calls.
    pub(super) async fn take_what_came(&mut self) -> Result<(), NoMessage> {
        let Some(rest) = &mut self.rest else { return Ok(()) };
        match poll_fn(|cx| Poll::Ready(rest.poll_data(cx))).await {
            Poll::Ready(Some(Ok(part))) => {
                self.body = part;
                if rest.is_end_stream() {
                    self.rest = None;
                }
                Ok(())
            }
            Poll::Ready(Some(Err(_))) => Err(NoMessage::Cancelled),
            // An end may come with trailers: left to whoever reads on.
            Poll::Ready(None) | Poll::Pending => Ok(()),
        }
    }

    /// Reads until the body has a whole message.
    pub(super) async fn message(&mut self) -> Result<Message, NoMessage> {
        let mut joined = BytesMut::new();
        let mut stall = Stall::new(self.limit);
        loop {
            let so_far = if joined.is_empty() { &self.body[..] } else { &joined[..] };
            let found = frame::look(so_far);
            let found = match (found, &mut self.rest) {
                (Body::TooLarge(length), _) => return Err(NoMessage::TooLarge(length)),
                (Body::Whole { length, compressed }, _) => Some(Message::Whole { length, compressed, alone: so_far.len() == frame::HEAD + length }),
                (Body::Part, None) => Some(Message::None),
                (Body::Part, Some(_)) => None,
            };
            if let Some(found) = found {
                if !joined.is_empty() {
                    self.body = joined.freeze();
                }
                return Ok(found);
            }
            let Some(rest) = &mut self.rest else { continue };
            let part = poll_fn(|cx| match rest.poll_data(cx) {
                Poll::Ready(part) => Poll::Ready(Ok(part)),
                Poll::Pending => stall.poll(cx).map(Err),
            });
            match part.await {
                Ok(Some(Ok(part))) => {
                    stall.progressed();
                    if rest.is_end_stream() {
                        self.rest = None;
                    } else {
                        // A message is kept whole here; its size is limited. It can fail only if more is released than came.
                        let _ = rest.flow_control().release_capacity(part.len());
                    }
                    if self.body.is_empty() {
                        self.body = part;
                    } else {
                        if joined.is_empty() {
                            joined.extend_from_slice(&self.body);
                        }
                        joined.extend_from_slice(&part);
                    }
                }
                Ok(Some(Err(_))) => return Err(NoMessage::Cancelled),
                Ok(None) => {
                    // Trailers of a request have no meaning in gRPC.
                    self.rest = None;
                }
                Err(limit) => return Err(NoMessage::Stalled(limit)),
            }
        }
    }

    /// The message that [`Self::message`] found.
    pub(super) fn message_bytes(&self, length: usize) -> Bytes {
        self.body.slice(frame::HEAD..frame::HEAD + length)
    }
}
