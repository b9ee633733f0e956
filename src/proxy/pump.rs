//! Passes a body on, part by part as it comes, no faster than the other side takes it.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use http::HeaderMap;

use super::stall::Stall;
use crate::backends::cri::{Error, Receiving, Sending};

/// Room in the peer's windows that is asked for at once, so that no stream takes all of the connection's. Bytes.
const RESERVE: usize = 64 << 10;
/// What was taken is told the sender in parts of this size, not for each frame. Bytes; less than half of the stream's window.
const RELEASE: usize = 64 << 10;

/// A body was not passed on to its end.
#[derive(Debug)]
pub(super) enum Broken {
    /// The caller cancelled it, or its connection ended.
    Cancelled,
    /// The container runtime ended it, or its connection did.
    Source(Error),
    /// Its sender sent no more of it for this long.
    SourceStalled(Duration),
    /// Its receiver does not want it any more.
    Sink,
    /// Its receiver took no more of it for this long.
    SinkStalled(Duration),
}

/// What a body comes from.
pub(super) trait Source {
    /// The next part; `None` behind the last.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Broken>>>;
    /// The trailers, behind the last part.
    fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, Broken>>;
    /// So much of it was passed on.
    fn release(&mut self, length: usize);
}

/// What a body goes to.
pub(super) trait Target {
    /// Takes a part; the one before must have been sent.
    fn give(&mut self, part: Bytes);
    /// Sends what was given, as the receiver has room for it.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>>;
    /// Ends it.
    fn end(&mut self, trailers: Option<HeaderMap>) -> Result<(), Broken>;
}

impl Source for RecvStream {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Broken>>> {
        RecvStream::poll_data(self, cx).map_err(|_| Broken::Cancelled)
    }

    fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, Broken>> {
        RecvStream::poll_trailers(self, cx).map_err(|_| Broken::Cancelled)
    }

    fn release(&mut self, length: usize) {
        // It can fail only if more is released than came.
        let _ = self.flow_control().release_capacity(length);
    }
}

impl Source for Receiving {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Broken>>> {
        Receiving::poll_data(self, cx).map_err(Broken::Source)
    }

    fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, Broken>> {
        Receiving::poll_trailers(self, cx).map_err(Broken::Source)
    }

    fn release(&mut self, _: usize) {
        // It is asked for the next part only when the one before was passed on.
    }
}

impl Target for Sending {
    fn give(&mut self, part: Bytes) {
        Sending::give(self, part);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        self.poll_sent(cx).map_err(|_| Broken::Sink)
    }

    fn end(&mut self, trailers: Option<HeaderMap>) -> Result<(), Broken> {
        Sending::end(self, trailers);
        Ok(())
    }
}

/// The sending half of a caller's stream.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) stream: SendStream<Bytes>,
    unsent: Bytes,
    stall: Stall,
}

impl Sink {
    /// Of a stream whose receiver may leave data unread for so long.
    pub(super) fn new(stream: SendStream<Bytes>, limit: Option<Duration>) -> Self {
        Self { stream, unsent: Bytes::new(), stall: Stall::new(limit) }
    }

    /// Sends a part to its end; [`Broken::Sink`] as well if the receiver wants no more before that.
    pub(super) async fn send(&mut self, part: Bytes) -> Result<(), Broken> {
        self.give(part);
        poll_fn(|cx| match self.poll_send(cx) {
            Poll::Pending => self.stream.poll_reset(cx).map(|_| Err(Broken::Sink)),
            ready => ready,
        })
        .await
    }
}

impl Target for Sink {
    fn give(&mut self, part: Bytes) {
        debug_assert!(self.unsent.is_empty());
        self.unsent = part;
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        while !self.unsent.is_empty() {
            self.stream.reserve_capacity(self.unsent.len().min(RESERVE));
            let room = self.stream.capacity().min(self.unsent.len());
            if room > 0 {
                self.stall.progressed();
                if self.stream.send_data(self.unsent.split_to(room), false).is_err() {
                    return Poll::Ready(Err(Broken::Sink));
                }
                continue;
            }
            match self.stream.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(_) => return Poll::Ready(Err(Broken::Sink)),
                Poll::Pending => return self.stall.poll(cx).map(|limit| Err(Broken::SinkStalled(limit))),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn end(&mut self, trailers: Option<HeaderMap>) -> Result<(), Broken> {
        let ended = match trailers {
            Some(trailers) => self.stream.send_trailers(trailers),
            None => self.stream.send_data(Bytes::new(), true),
        };
        ended.map_err(|_| Broken::Sink)
    }
}

/// Passes a body from a stream to another.
#[derive(Debug)]
pub(super) struct Pump<S, T> {
    pub(super) from: S,
    pub(super) to: T,
    /// Whether anything but an end was passed on.
    pub(super) has_passed: bool,
    held: usize,
    stall: Stall,
}

impl<S: Source, T: Target> Pump<S, T> {
    /// With a limit for the time that the sender sends nothing.
    pub(super) fn new(from: S, to: T, limit: Option<Duration>) -> Self {
        Self { from, to, has_passed: false, held: 0, stall: Stall::new(limit) }
    }

    /// Passes on what there is; ready when the end, with the trailers if there are any, was passed on as well.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.to.poll_send(cx))?;
            if self.held >= RELEASE {
                self.from.release(std::mem::take(&mut self.held));
            }
            match self.from.poll_data(cx) {
                Poll::Ready(Some(part)) => {
                    let part = part?;
                    self.stall.progressed();
                    self.has_passed |= !part.is_empty();
                    self.held += part.len();
                    self.to.give(part);
                }
                Poll::Ready(None) => break,
                Poll::Pending => return self.stall.poll(cx).map(|limit| Err(Broken::SourceStalled(limit))),
            }
        }
        let trailers = ready!(self.from.poll_trailers(cx))?;
        self.has_passed |= trailers.is_some();
        Poll::Ready(self.to.end(trailers))
    }
}
