//! Passes a body on, part by part as it comes, no faster than the other side takes it.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{RecvStream, SendStream};

use super::stall::Stall;

/// Room in the peer's windows that is asked for at once, so that no stream takes all of the connection's. Bytes.
const RESERVE: usize = 64 << 10;
/// What was taken is told the sender in parts of this size, not for each frame. Bytes; less than half of the stream's window.
const RELEASE: usize = 64 << 10;

/// A body was not passed on to its end.
#[derive(Debug)]
pub(super) enum Broken {
    /// Its sender ended it, or the sender's connection did.
    Source(h2::Error),
    /// Its sender sent no more of it for this long.
    SourceStalled(Duration),
    /// Its receiver does not want it any more.
    Sink,
    /// Its receiver took no more of it for this long.
    SinkStalled(Duration),
}

/// The sending half of a stream.
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

    /// Takes a part; the one before must have been sent.
    pub(super) fn give(&mut self, part: Bytes) {
        debug_assert!(self.unsent.is_empty());
        self.unsent = part;
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

    /// Sends what was given, as the receiver has room for it.
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
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
}

/// Passes a body from a stream to another.
#[derive(Debug)]
pub(super) struct Pump {
    pub(super) from: RecvStream,
    pub(super) to: Sink,
    /// Whether anything but an end was passed on.
    pub(super) has_passed: bool,
    held: usize,
    stall: Stall,
}

impl Pump {
    /// With a limit for the time that the sender sends nothing.
    pub(super) fn new(from: RecvStream, to: Sink, limit: Option<Duration>) -> Self {
        Self { from, to, has_passed: false, held: 0, stall: Stall::new(limit) }
    }

    /// Passes on what there is; ready when the end, with the trailers if there are any, was passed on as well.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.to.poll_send(cx))?;
            if self.held >= RELEASE {
                // It can fail only if more is released than came.
                let _ = self.from.flow_control().release_capacity(std::mem::take(&mut self.held));
            }
            match self.from.poll_data(cx) {
                Poll::Ready(Some(Ok(part))) => {
                    self.stall.progressed();
                    self.has_passed |= !part.is_empty();
                    self.held += part.len();
                    self.to.give(part);
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(Broken::Source(error))),
                Poll::Ready(None) => break,
                Poll::Pending => return self.stall.poll(cx).map(|limit| Err(Broken::SourceStalled(limit))),
            }
        }
        let ended = match ready!(self.from.poll_trailers(cx)).map_err(Broken::Source)? {
            Some(trailers) => {
                self.has_passed = true;
                self.to.stream.send_trailers(trailers)
            }
            None => self.to.stream.send_data(Bytes::new(), true),
        };
        Poll::Ready(ended.map_err(|_| Broken::Sink))
    }
}
