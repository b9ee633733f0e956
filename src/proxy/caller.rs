//! The caller's side of a call: it receives one response, or cancels.

use std::{
    error::Error,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE, response};
use kiyot_http2::{Reason, server::SendResponse};
use kiyot_values::error_chain::error_chain;
use tonic::{Code, Status};

use super::{
    copy_body::{BodySink, CallerSink, CopyError, GRPC_STATUS, record_status},
    frame,
};
use crate::metrics::CallRecord;

const GRPC_CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
/// Header of the message encodings that a peer accepts.
pub(super) const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_OK: HeaderValue = HeaderValue::from_static("0");

/// The caller, before its response has begun.
#[derive(Debug)]
pub(super) struct Caller {
    respond: SendResponse,
    /// Limit on the time that the caller leaves a response unread.
    limit: Duration,
    record: CallRecord,
}

/// The caller has reset the call, or its connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cancelled;

impl Caller {
    /// Wraps the response handle of a request.
    pub(super) fn new(respond: SendResponse, limit: Duration, record: CallRecord) -> Self {
        Self { respond, limit, record }
    }

    /// Sets the backend by which the call is counted.
    pub(super) fn set_backend(&mut self, backend: u8) {
        self.record.set_backend(backend);
    }

    /// Completes when the caller cancels.
    pub(super) fn poll_gone(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Cancelled> {
        self.respond.poll_reset(cx).map(|()| Cancelled)
    }

    /// Drives `work` until it completes or the caller cancels.
    pub(super) async fn wait<F: Future>(&mut self, work: F) -> Result<F::Output, Cancelled> {
        let mut work = pin!(work);
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => self.poll_gone(cx).map(Err),
        })
        .await
    }

    /// Sends the head of a response. Returns `None` if the response is complete or the caller has
    /// cancelled.
    pub(super) fn send_response(
        mut self,
        head: &response::Parts,
        end_of_stream: bool,
    ) -> Option<CallerSink> {
        let stream = self.respond.send_response(head, end_of_stream).ok()?;
        if end_of_stream {
            record_status(&mut self.record, Some(&head.headers));
            return None;
        }
        Some(CallerSink::new(stream, Some(self.limit), self.record))
    }

    /// Resets the stream.
    pub(super) fn reset(mut self, reason: Reason) {
        self.record.set_code(None);
        self.respond.send_reset(reason);
    }

    /// Responds with a status alone ("Trailers-Only").
    pub(super) fn send_status(self, status: &Status) {
        self.send_status_with(status, HeaderMap::new());
    }

    /// Responds with a status and further headers.
    pub(super) fn send_status_with(self, status: &Status, headers: HeaderMap) {
        let mut head = grpc_head();
        head.headers.extend(headers);
        insert_status(status, &mut head.headers);
        // The response is complete.
        drop(self.send_response(&head, true));
    }

    /// Responds with a message.
    pub(super) async fn send_message(self, message: Bytes) {
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert(GRPC_STATUS, GRPC_OK);
        self.send_body(grpc_head(), frame::encode(message), Some(trailers)).await;
    }

    /// Responds with a head, a body in parts, and trailers.
    pub(super) async fn send_body(
        self,
        head: response::Parts,
        body: Vec<Bytes>,
        trailers: Option<HeaderMap>,
    ) {
        let end_of_stream = body.is_empty() && trailers.is_none();
        let Some(mut sink) = self.send_response(&head, end_of_stream) else { return };
        for part in body {
            match sink.send(part).await {
                Ok(()) => {}
                Err(CopyError::SinkIdle(after)) => {
                    tracing::debug!(?after, "caller left its response unread");
                    return sink.stream.send_reset(Reason::CANCEL);
                }
                Err(_) => return,
            }
        }
        sink.end(trailers);
    }
}

/// Returns the head of kiyot's own responses.
pub(super) fn grpc_head() -> response::Parts {
    let mut head = Response::new(());
    head.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    head.into_parts().0
}

/// Ends a response with a status, after its head was sent.
pub(super) fn finish_with_status(sink: &mut CallerSink, status: &Status) {
    let mut trailers = HeaderMap::new();
    insert_status(status, &mut trailers);
    sink.end(Some(trailers));
}

fn insert_status(status: &Status, headers: &mut HeaderMap) {
    if status.add_header(headers).is_err() {
        // The status's metadata can't be written as headers; the code can.
        headers.insert(GRPC_STATUS, HeaderValue::from(status.code() as i32));
    }
}

/// Returns a status with an error and its sources as the message.
pub(super) fn status_from_error(code: Code, error: &dyn Error) -> Status {
    Status::new(code, error_chain(error))
}
