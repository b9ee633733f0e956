//! The body of a response, and the gRPC status of its HTTP/2 errors.

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

/// A response body with a deadline. Its call counts as open until the body is dropped.
#[derive(Debug)]
pub(super) struct ResponseBody {
    body: Incoming,
    /// The time by which the body must be complete.
    deadline: Option<Instant>,
    /// The deadline's timer, made at the first wait: most bodies are complete at once.
    timer: Option<Pin<Box<Sleep>>>,
    _open: OpenCall,
}

impl ResponseBody {
    pub(super) fn new(body: Incoming, open: OpenCall, deadline: Option<Instant>) -> Self {
        Self { body, deadline, timer: None, _open: open }
    }

    /// Returns whether the deadline has passed; if not, registers the task to be woken then.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> bool {
        let Some(deadline) = self.deadline else { return false };
        self.timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)))
            .as_mut()
            .poll(context)
            .is_ready()
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_pending() && self.poll_deadline(context) {
            return Poll::Ready(Some(Err(Status::deadline_exceeded(
                "the link: the response has begun, but was not complete within the call's deadline",
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
            Err(error) => Err(to_status(&error, "the link")),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Maps an HTTP/2 error to a gRPC status: a RST_STREAM of the peer fails the call by its reason,
/// any other error is UNAVAILABLE.
pub(super) fn to_status(error: &hyper::Error, name: &str) -> Status {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        cause = error.source();
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            // The debug data of a GOAWAY is the peer's.
            let text = sanitize(&format!("{name}: the agent ended the call: {error}"));
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
    }
    Status::unavailable(sanitize(&format!("{name}: the connection ended: {error}")))
}
