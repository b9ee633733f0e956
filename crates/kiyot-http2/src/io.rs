//! Socket of a connection, with its read buffer.

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

/// Bytes of a read, which hold several of the longest frames.
const INPUT_BYTES: usize = 64 << 10;

/// Socket between a core and its peer.
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

    /// Reads once, and gives complete frames to the core. Returns false at the end of the
    /// connection. Pending while the peer doesn't read; then `poll_write` wakes the task.
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
                // The remaining bytes are less than a frame, so the buffer has room for the whole
                // frame.
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

    /// Writes all output. A lone PING ACK may wait shortly for other frames.
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
                self.socket.stop_write_interest();
                return Poll::Ready(Ok(()));
            }
            let length = ready!(self.socket.poll_send(cx, output))?;
            core.advance(length);
        }
    }

    /// Returns whether the read buffer has an incomplete frame.
    pub(super) fn has_partial_frame(&self) -> bool {
        self.end > 0
    }
}
