//! Passes a body on, part by part as it comes, no faster than the other side takes it.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use kiyot_http2::{Error, RecvStream, SendStream};

use super::idle_timeout::IdleTimeout;

/// A body was not passed on to its end.
#[derive(Debug)]
pub(super) enum CopyError {
    /// Its sender ended it, or the sender's connection did.
    Source(Error),
    /// Its sender sent no more of it for this long.
    SourceIdle(Duration),
    /// Its receiver does not want it any more.
    SinkClosed,
    /// Its receiver took no more of it for this long.
    SinkIdle(Duration),
}

/// What a body goes to.
pub(super) trait BodySink {
    /// Takes a part; the one before must have been sent.
    fn give(&mut self, part: Bytes);
    /// Sends what was given, as the receiver has room for it.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CopyError>>;
    /// Ends it.
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

/// The sending half of a caller's stream.
#[derive(Debug)]
pub(super) struct CallerSink {
    pub(super) stream: SendStream,
    /// What was unsent when it was looked last.
    left: usize,
    idle: IdleTimeout,
}

impl CallerSink {
    /// Of a stream whose receiver may leave data unread for so long.
    pub(super) fn new(stream: SendStream, limit: Option<Duration>) -> Self {
        Self { stream, left: 0, idle: IdleTimeout::new(limit) }
    }

    /// Sends a part to its end; [`CopyError::SinkClosed`] as well if the receiver wants no more before that.
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
                let left = self.stream.unsent_bytes();
                if std::mem::replace(&mut self.left, left) != left {
                    self.idle.reset();
                }
                self.idle.poll(cx).map(|limit| Err(CopyError::SinkIdle(limit)))
            }
        }
    }

    fn end(&mut self, trailers: Option<HeaderMap>) {
        self.stream.finish(trailers);
    }
}

/// Passes a body from a stream to another.
#[derive(Debug)]
pub(super) struct CopyBody<T> {
    pub(super) from: RecvStream,
    pub(super) to: T,
    /// Whether anything but an end was passed on.
    pub(super) has_sent: bool,
    idle: IdleTimeout,
}

impl<T: BodySink> CopyBody<T> {
    /// With a limit for the time that the sender sends nothing.
    pub(super) fn new(from: RecvStream, to: T, limit: Option<Duration>) -> Self {
        Self { from, to, has_sent: false, idle: IdleTimeout::new(limit) }
    }

    /// Passes on what there is; ready when the end, with the trailers if there are any, was passed
    /// on as well.
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
