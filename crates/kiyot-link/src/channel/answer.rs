//! The body of an answer, and what its failures mean.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;

use super::sanitize::{self, sanitize};
use crate::connection::OpenCall;

/// The body of an answer. Its call is open until it is dropped.
#[derive(Debug)]
pub(super) struct Answer {
    body: Incoming,
    /// When it must be whole.
    deadline: Option<Instant>,
    /// Wakes then. Most answers are whole at once, and need none.
    alarm: Option<Pin<Box<Sleep>>>,
    _open: OpenCall,
}

impl Answer {
    pub(super) fn new(body: Incoming, open: OpenCall, deadline: Option<Instant>) -> Self {
        Self { body, deadline, alarm: None, _open: open }
    }

    /// Whether its time is over; if not, the task is woken then.
    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        let Some(deadline) = self.deadline else { return false };
        self.alarm
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)))
            .as_mut()
            .poll(context)
            .is_ready()
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_pending() && self.is_late(context) {
            return Poll::Ready(Some(Err(Status::deadline_exceeded(
                "the link: the answer has begun, and was not whole within the call's deadline",
            ))));
        }
        let frame = ready!(frame);
        Poll::Ready(frame.map(|frame| match frame {
            Ok(mut frame) => {
                if let Some(trailers) = frame.trailers_mut() {
                    sanitize::clean(trailers);
                }
                Ok(frame)
            }
            Err(error) => Err(status(&error, "the link")),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a failure below gRPC means: the other side's reset of one stream is about that call,
/// anything else is about the connection.
pub(super) fn status(error: &hyper::Error, of: &str) -> Status {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(one) = cause {
        if let Some(error) = one.downcast_ref::<h2::Error>() {
            // The reason of a GOAWAY is the other side's.
            let text = sanitize(&format!("{of}: the agent ended the call: {error}"));
            match error.reason() {
                Some(h2::Reason::CANCEL) if error.is_reset() && error.is_remote() => {
                    return Status::cancelled(text);
                }
                Some(h2::Reason::ENHANCE_YOUR_CALM) if error.is_reset() && error.is_remote() => {
                    return Status::resource_exhausted(text);
                }
                Some(h2::Reason::REFUSED_STREAM) => {}
                Some(_) if error.is_reset() && error.is_remote() => return Status::internal(text),
                _ => {}
            }
        }
        cause = one.source();
    }
    Status::unavailable(sanitize(&format!("{of}: the connection ended: {error}")))
}
