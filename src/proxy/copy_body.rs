//! Copying of a body between streams, with backpressure.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use kiyot_http2::{Error, Reason, RecvStream, SendStream};
use tonic::Status;

use super::{idle_timeout::IdleTimeout, trace_context};
use crate::metrics::CallRecord;

/// Header of a response's status, in its trailers.
pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// A body that was not copied to its end.
#[derive(Debug)]
pub(super) enum CopyError {
    /// The sender reset the stream, or its connection was lost.
    Source(Error),
    /// The sender sent nothing for this long.
    SourceIdle(Duration),
    /// The receiver has closed its stream.
    SinkClosed,
    /// The receiver took nothing for this long.
    SinkIdle(Duration),
    /// The body must not reach the receiver.
    Refused(Status),
}

/// Destination of a body.
pub(super) trait BodySink {
    /// Buffers a part. The previous part must have been sent.
    fn give(&mut self, part: Bytes);
    /// Sends the buffered part as the receiver grants capacity.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CopyError>>;
    /// Ends the stream.
    fn end(&mut self, trailers: Option<HeaderMap>);
}

impl BodySink for SendStream {
    fn give(&mut self, part: Bytes) {
        SendStream::send_data(self, part);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CopyError>> {
        self.poll_ready(cx).map_err(|_| CopyError::SinkClosed)
    }

    fn end(&mut self, trailers: Option<HeaderMap>) {
        SendStream::finish(self, trailers);
    }
}

/// The sending half of a caller's stream, with an idle timeout.
#[derive(Debug)]
pub(super) struct CallerSink {
    pub(super) stream: SendStream,
    /// Unsent bytes at the last poll.
    unsent: usize,
    idle: IdleTimeout,
    record: CallRecord,
}

impl CallerSink {
    /// Wraps a stream whose receiver may leave data unread for at most `limit`.
    pub(super) fn new(stream: SendStream, limit: Option<Duration>, record: CallRecord) -> Self {
        Self { stream, unsent: 0, idle: IdleTimeout::new(limit), record }
    }

    /// Resets the stream as the runtime did.
    pub(super) fn reset(&mut self, reason: Reason) {
        self.record.set_code(None);
        self.stream.send_reset(reason);
    }

    /// Sends a whole part.
    pub(super) async fn send(&mut self, part: Bytes) -> Result<(), CopyError> {
        self.give(part);
        poll_fn(|cx| self.poll_send(cx)).await
    }
}

impl BodySink for CallerSink {
    fn give(&mut self, part: Bytes) {
        self.stream.send_data(part);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CopyError>> {
        match self.stream.poll_ready(cx) {
            Poll::Ready(sent) => {
                self.idle.reset();
                Poll::Ready(sent.map_err(|_| CopyError::SinkClosed))
            }
            Poll::Pending => {
                let unsent = self.stream.unsent_bytes();
                if std::mem::replace(&mut self.unsent, unsent) != unsent {
                    self.idle.reset();
                }
                self.idle.poll(cx).map(|limit| Err(CopyError::SinkIdle(limit)))
            }
        }
    }

    fn end(&mut self, trailers: Option<HeaderMap>) {
        record_status(&mut self.record, trailers.as_ref());
        self.stream.finish(trailers);
    }
}

/// Copies a body from a stream to a sink.
#[derive(Debug)]
pub(super) struct CopyBody<T> {
    pub(super) from: RecvStream,
    pub(super) to: T,
    /// Data or trailers were copied.
    pub(super) has_sent: bool,
    idle: IdleTimeout,
}

impl<T: BodySink> CopyBody<T> {
    /// Makes a copy whose sender may send nothing for at most `limit`.
    pub(super) fn new(from: RecvStream, to: T, limit: Option<Duration>) -> Self {
        Self { from, to, has_sent: false, idle: IdleTimeout::new(limit) }
    }

    /// Sends a part before all others. The sink must be new.
    pub(super) fn begin_with(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.has_sent = true;
            self.to.give(part);
        }
    }

    /// Copies all available data. Completes after the end of the stream and its trailers.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CopyError>> {
        loop {
            ready!(self.to.poll_send(cx))?;
            match self.from.poll_data(cx) {
                Poll::Ready(Some(part)) => {
                    let part = part.map_err(CopyError::Source)?;
                    self.idle.reset();
                    self.has_sent |= !part.is_empty();
                    self.to.give(part);
                }
                Poll::Ready(None) => break,
                Poll::Pending => {
                    return self.idle.poll(cx).map(|limit| Err(CopyError::SourceIdle(limit)));
                }
            }
        }
        let trailers = ready!(self.from.poll_trailers(cx)).map_err(CopyError::Source)?;
        self.has_sent |= trailers.is_some();
        self.to.end(trailers);
        Poll::Ready(Ok(()))
    }
}

/// Records the code of a response's headers or trailers; `None` without a readable code.
pub(super) fn record_status(record: &mut CallRecord, headers: Option<&HeaderMap>) {
    let code = headers.and_then(|headers| headers.get(GRPC_STATUS)?.to_str().ok()?.parse().ok());
    trace_context::record_code(code);
    record.set_code(code);
}
