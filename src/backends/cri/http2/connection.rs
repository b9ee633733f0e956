//! The socket of a connection, and what drives it.

use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use tokio::net::UnixStream;

use super::{
    call::{Client, lock},
    core::Core,
    error::{Error, Violation},
    frame::{HEAD, Head, MAX_PAYLOAD},
};
use crate::backends::cri::{
    pong::{self, Pong},
    socket::Socket,
};
use h2::Reason;

/// What one read takes at most. Bytes; several of the longest frames.
const INPUT: usize = 64 << 10;

/// Drives a connection until it ends. When it is dropped, its calls end.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    core: Arc<Mutex<Core>>,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    pong: Pong,
}

impl Connection {
    /// Of a socket that was connected just now. Nothing is sent before it is driven.
    ///
    /// # Errors
    /// If the socket can't be waited on.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        let core = Arc::new(Mutex::new(Core::new()));
        Ok(Self { socket: Socket::new(stream)?, core, input: vec![0; INPUT].into(), start: 0, end: 0, pong: Pong::default() })
    }

    /// To begin calls with.
    pub(crate) fn client(&self) -> Client {
        Client(self.core.clone())
    }

    /// Ready when the other side said something: one that accepts and stays silent is no connection.
    ///
    /// # Errors
    /// If it says something else than HTTP/2, or hangs up.
    pub(crate) async fn greeting(&mut self) -> Result<(), Error> {
        poll_fn(|cx| match Pin::new(&mut *self).poll(cx) {
            Poll::Ready(ended) => Poll::Ready(Err(ended.err().unwrap_or(Error::Closed))),
            Poll::Pending if lock(&self.core).was_greeted() => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Reads until there is nothing more to be read now.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while lock(&self.core).may_read() {
            match self.socket.poll_recv(cx, &mut self.input[self.end..]) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(Error::Io(Arc::new(error)))),
                Poll::Ready(Ok(0)) => return Poll::Ready(if lock(&self.core).is_done() { Ok(()) } else { Err(Error::Closed) }),
                Poll::Ready(Ok(length)) => self.end += length,
            }
            if let Err(violation) = self.frames() {
                lock(&self.core).condemn(violation);
                // It is told if there is room for it.
                let _ = self.poll_write(cx);
                return Poll::Ready(Err(violation.into()));
            }
        }
        Poll::Pending
    }

    fn poll_both(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            if let Poll::Ready(ended) = self.poll_read(cx) {
                return Poll::Ready(ended);
            }
            let must_write_first = !lock(&self.core).may_read();
            // What the other side sent before it hung up was read above.
            let written = self.poll_write(cx).map_err(|error| Error::Io(Arc::new(error)))?;
            if lock(&self.core).is_done() {
                return Poll::Ready(Ok(()));
            }
            if !must_write_first || written.is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// Takes the frames that came whole.
    fn frames(&mut self) -> Result<(), Violation> {
        let core = &mut *lock(&self.core);
        while let Some(head) = Head::read(&self.input[self.start..self.end]) {
            if head.length > MAX_PAYLOAD {
                return Err(Violation(Reason::FRAME_SIZE_ERROR, "a frame is too long"));
            }
            let payload = self.start + HEAD;
            if payload + head.length > self.end {
                break;
            }
            core.receive(head, &self.input[payload..payload + head.length])?;
            self.start = payload + head.length;
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if INPUT - self.start < HEAD + MAX_PAYLOAD {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        Ok(())
    }

    /// Writes what there is. If that is nothing but the answer to a PING, it may wait a moment for company.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let core = &mut *lock(&self.core);
        loop {
            let output = core.output();
            if self.pong.poll_may_wait(cx, pong::is_alone(output)) {
                return Poll::Pending;
            }
            if output.is_empty() {
                self.socket.all_sent();
                return Poll::Ready(Ok(()));
            }
            let length = std::task::ready!(self.socket.poll_send(cx, output))?;
            core.wrote(length);
        }
    }
}

impl Future for Connection {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        lock(&this.core).set_driver(cx.waker());
        let ended = this.poll_both(cx);
        if let Poll::Ready(Err(error)) = &ended {
            lock(&this.core).end(error);
        }
        ended
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.core).end(&Error::GivenUp);
    }
}
