//! The caller's side of a call: it takes one answer, or has gone away.

use std::{
    error::Error,
    fmt::Write,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE, response};
use kiyot_http2::{Reason, SendStream, server::SendResponse};
use tonic::{Code, Status};

use super::{
    copy_body::{CallerSink, CopyError},
    frame,
};

const GRPC_CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
/// The status of an answer, in its trailers (gRPC over HTTP2).
pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// What encodings of messages one takes.
pub(super) const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_OK: HeaderValue = HeaderValue::from_static("0");

/// Where the answer goes.
#[derive(Debug)]
pub(super) struct Caller {
    respond: SendResponse,
    /// How long the caller may leave an answer unread.
    pub(super) limit: Duration,
}

/// The caller has cancelled the call, or its connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cancelled;

impl Caller {
    /// Of the response handle of a request.
    pub(super) fn new(respond: SendResponse, limit: Duration) -> Self {
        Self { respond, limit }
    }

    /// Ready when the caller has gone. Only before the answer has begun.
    pub(super) fn poll_gone(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Cancelled> {
        self.respond.poll_reset(cx).map(|()| Cancelled)
    }

    /// Works for the caller, as long as it is there.
    pub(super) async fn wait<F: Future>(&mut self, work: F) -> Result<F::Output, Cancelled> {
        let mut work = pin!(work);
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => self.poll_gone(cx).map(Err),
        })
        .await
    }

    /// Begins an answer; `None` if it is all of it, or if the caller has gone.
    pub(super) fn send_response(self, head: &response::Parts, ended: bool) -> Option<CallerSink> {
        let stream = self.respond.send_response(head, ended).ok()?;
        (!ended).then(|| CallerSink::new(stream, Some(self.limit)))
    }

    /// Resets the stream.
    pub(super) fn reset(self, reason: Reason) {
        self.respond.send_reset(reason);
    }

    /// Answers with a status alone ("trailers only").
    pub(super) fn send_status(self, status: &Status) {
        self.send_status_with(status, HeaderMap::new());
    }

    /// The same, with more metadata.
    pub(super) fn send_status_with(self, status: &Status, more: HeaderMap) {
        let mut head = grpc_head();
        head.headers.extend(more);
        add(status, &mut head.headers);
        // There is nothing more of it.
        drop(self.send_response(&head, true));
    }

    /// Answers with a message.
    pub(super) async fn send_message(self, message: Bytes) {
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(GRPC_STATUS, GRPC_OK);
        self.send_body(grpc_head(), frame::encode(message), Some(trailers)).await;
    }

    /// Answers with metadata, a body in parts, and trailers.
    pub(super) async fn send_body(
        self,
        head: response::Parts,
        body: Vec<Bytes>,
        trailers: Option<HeaderMap>,
    ) {
        let ended = body.is_empty() && trailers.is_none();
        let Some(mut sink) = self.send_response(&head, ended) else { return };
        for part in body {
            match sink.send(part).await {
                Ok(()) => {}
                Err(CopyError::SinkIdle(after)) => {
                    tracing::debug!(?after, "a caller left its answer unread");
                    return sink.stream.send_reset(Reason::CANCEL);
                }
                Err(_) => return,
            }
        }
        sink.stream.finish(trailers);
    }
}

/// The metadata of an answer of our own.
pub(super) fn grpc_head() -> response::Parts {
    let mut head = Response::new(());
    head.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    head.into_parts().0
}

/// Ends an answer that had begun, with an error.
pub(super) fn finish_with_status(stream: &mut SendStream, status: &Status) {
    let mut trailers = HeaderMap::new();
    add(status, &mut trailers);
    stream.finish(Some(trailers));
}

fn add(status: &Status, headers: &mut HeaderMap) {
    if status.add_header(headers).is_err() {
        // Its metadata or message can't be written as headers: the code still can.
        headers.insert(GRPC_STATUS, HeaderValue::from(status.code() as i32));
    }
}

/// A status of a code, with an error and its sources as the message.
pub(super) fn status_from_error(code: Code, error: &dyn Error) -> Status {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Writing to a String does not fail.
        let _ = write!(message, ": {error}");
        source = error.source();
    }
    Status::new(code, message)
}
