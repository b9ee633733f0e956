//! Passes a body on, part by part as it comes, no faster than the other side takes it.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;

use super::stall::Stall;
use crate::http2::{Error, Receiving, Sending};

/// A body was not passed on to its end.
#[derive(Debug)]
pub(super) enum Broken {
    /// Its sender ended it, or the sender's connection did.
    Source(Error),
    /// Its sender sent no more of it for this long.
    SourceStalled(Duration),
    /// Its receiver does not want it any more.
    Sink,
    /// Its receiver took no more of it for this long.
    SinkStalled(Duration),
}

/// What a body goes to.
pub(super) trait Target {
    /// Takes a part; the one before must have been sent.
    fn give(&mut self, part: Bytes);
    /// Sends what was given, as the receiver has room for it.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>>;
    /// Ends it.
    fn end(&mut self, trailers: Option<HeaderMap>);
}

impl Target for Sending {
    fn give(&mut self, part: Bytes) {
        Sending::give(self, part);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        self.poll_sent(cx).map_err(|_| Broken::Sink)
    }

    fn end(&mut self, trailers: Option<HeaderMap>) {
        Sending::end(self, trailers);
    }
}

/// The sending half of a caller's stream.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) stream: Sending,
    /// What was unsent when it was looked last.
    left: usize,
    stall: Stall,
}

impl Sink {
    /// Of a stream whose receiver may leave data unread for so long.
    pub(super) fn new(stream: Sending, limit: Option<Duration>) -> Self {
        Self { stream, left: 0, stall: Stall::new(limit) }
    }

    /// Sends a part to its end; [`Broken::Sink`] as well if the receiver wants no more before that.
    pub(super) async fn send(&mut self, part: Bytes) -> Result<(), Broken> {
        self.give(part);
        poll_fn(|cx| self.poll_send(cx)).await
    }
}

impl Target for Sink {
    fn give(&mut self, part: Bytes) {
        self.stream.give(part);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        match self.stream.poll_sent(cx) {
            Poll::Ready(sent) => {
                self.stall.progressed();
                Poll::Ready(sent.map_err(|_| Broken::Sink))
            }
            Poll::Pending => {
                let left = self.stream.unsent();
                if std::mem::replace(&mut self.left, left) != left {
                    self.stall.progressed();
                }
                self.stall.poll(cx).map(|limit| Err(Broken::SinkStalled(limit)))
            }
        }
    }

    fn end(&mut self, trailers: Option<HeaderMap>) {
        self.stream.end(trailers);
    }
}

/// Passes a body from a stream to another.
#[derive(Debug)]
pub(super) struct Pump<T> {
    pub(super) from: Receiving,
    pub(super) to: T,
    /// Whether anything but an end was passed on.
    pub(super) has_passed: bool,
    stall: Stall,
}

impl<T: Target> Pump<T> {
    /// With a limit for the time that the sender sends nothing.
    pub(super) fn new(from: Receiving, to: T, limit: Option<Duration>) -> Self {
        Self { from, to, has_passed: false, stall: Stall::new(limit) }
    }

    /// Passes on what there is; ready when the end, with the trailers if there are any, was passed
    /// on as well.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.to.poll_send(cx))?;
            match self.from.poll_data(cx) {
                Poll::Ready(Some(part)) => {
                    let part = part.map_err(Broken::Source)?;
                    self.stall.progressed();
                    self.has_passed |= !part.is_empty();
                    self.to.give(part);
                }
                Poll::Ready(None) => break,
                Poll::Pending => {
                    return self.stall.poll(cx).map(|limit| Err(Broken::SourceStalled(limit)));
                }
            }
        }
        let trailers = ready!(self.from.poll_trailers(cx)).map_err(Broken::Source)?;
        self.has_passed |= trailers.is_some();
        self.to.end(trailers);
        Poll::Ready(Ok(()))
    }
}
