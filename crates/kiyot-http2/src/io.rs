//! The socket of a connection, with what came of it in part.

use std::{
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use tokio::net::UnixStream;

use super::{
    body::lock,
    core::Core,
    error::Error,
    ping::{self, AckDelay},
    socket::Socket,
};

/// What one read takes at most. Bytes; several of the longest frames.
const INPUT_BYTES: usize = 64 << 10;

/// A socket between a core and its peer.
#[derive(Debug)]
pub(super) struct Io {
    socket: Socket,
    input: Box<[u8]>,
    end: usize,
    ack_delay: AckDelay,
}

impl Io {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self {
            socket: Socket::new(stream)?,
            input: vec![0; INPUT_BYTES].into(),
            end: 0,
            ack_delay: AckDelay::default(),
        })
    }

    /// Reads once, and has the core take the frames that came whole; whether there is more to come.
    /// Not while the peer does not read: then `poll_write` wakes.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        core: &Mutex<Core>,
    ) -> Poll<Result<bool, Error>> {
        if !lock(core).may_read() {
            return Poll::Pending;
        }
        match ready!(self.socket.poll_recv(cx, &mut self.input[self.end..])) {
            Err(error) => return Poll::Ready(Err(Error::Io(Arc::new(error)))),
            Ok(0) => return Poll::Ready(Ok(false)),
            Ok(length) => self.end += length,
        }
        let core = &mut *lock(core);
        match core.recv(&self.input[..self.end]) {
            Ok(consumed) => {
                // What is left is less than a frame, so that there is room for the rest of it.
                self.input.copy_within(consumed..self.end, 0);
                self.end -= consumed;
                Poll::Ready(Ok(true))
            }
            Err(violation) => {
                core.go_away(violation);
                Poll::Ready(Err(violation.into()))
            }
        }
    }

    /// Writes what there is. If that is nothing but the answer to a PING, it may wait a moment for
    /// company.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        core: &Mutex<Core>,
    ) -> Poll<io::Result<()>> {
        let core = &mut *lock(core);
        loop {
            let output = core.output();
            if self.ack_delay.poll_should_delay(cx, ping::is_lone_ack(output)) {
                return Poll::Pending;
            }
            if output.is_empty() {
                self.socket.all_sent();
                return Poll::Ready(Ok(()));
            }
            let length = ready!(self.socket.poll_send(cx, output))?;
            core.advance(length);
        }
    }

    /// Whether a frame has come in part.
    pub(super) fn has_partial_frame(&self) -> bool {
        self.end > 0
    }
}
