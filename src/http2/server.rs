//! A server's connection: hears calls, and answers them.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, response};
use tokio::{net::UnixStream, time::timeout};

use super::{
    Reason,
    body::{Handle, Receiving, Sending, lock},
    core::Core,
    error::{Error, Violation},
    line::Line,
};

/// How long the last words of a connection may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection that calls come on. Whoever has it drives it, and does with its handles what is
/// done: it is not woken for that.
#[derive(Debug)]
pub(crate) struct Serving {
    line: Line,
    core: Arc<Mutex<Core>>,
}

/// Where an answer goes that has not begun.
#[derive(Debug)]
pub(crate) struct Responding(Sending);

impl Serving {
    /// Of a socket that was accepted just now, for so many calls at once.
    ///
    /// # Errors
    /// If the socket can't be waited on.
    pub(crate) fn new(stream: UnixStream, calls: u32) -> io::Result<Self> {
        Ok(Self { line: Line::new(stream)?, core: Arc::new(Mutex::new(Core::of_server(calls))) })
    }

    /// Reads once; the calls that came are to be accepted then. Whether the other side may say
    /// more.
    ///
    /// # Errors
    /// If it says something else than HTTP/2: then there are no calls any more.
    pub(crate) fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        self.line.poll_read(cx, &self.core)
    }

    /// A call that came.
    pub(crate) fn accept(&mut self) -> Option<(Request<Receiving>, Responding)> {
        let (key, head) = lock(&self.core).accept()?;
        let handle = || Handle::new(&self.core, key);
        Some((head.map(|()| Receiving::new(handle())), Responding(Sending::new(handle()))))
    }

    /// Writes what there is.
    ///
    /// # Errors
    /// If the other side can't be written to.
    pub(crate) fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.line.poll_write(cx, &self.core)
    }

    /// Whether the other side is read from: not while it leaves too much unread itself.
    pub(crate) fn may_read(&self) -> bool {
        lock(&self.core).may_read()
    }

    /// How many frames came.
    pub(crate) fn frames(&self) -> u64 {
        lock(&self.core).frames()
    }

    /// Whether the other side has begun, and stopped between frames, where it may stay as long as
    /// it likes.
    pub(crate) fn is_between_frames(&self) -> bool {
        !self.line.is_within() && lock(&self.core).is_between_frames()
    }

    /// Whether the other side has said anything of HTTP/2.
    pub(crate) fn was_greeted(&self) -> bool {
        lock(&self.core).was_greeted()
    }

    /// Tells the other side to send no more calls. The connection has served when those that it
    /// sent all the same have ended.
    pub(crate) fn drain(&mut self) {
        lock(&self.core).drain();
    }

    /// Whether it has served, and all was written.
    pub(crate) fn is_done(&self) -> bool {
        let core = lock(&self.core);
        core.is_done() && core.backlog() == 0
    }

    /// Ends it: what was to be sent is still sent, and why it ends, if the other side reads that
    /// soon.
    pub(crate) async fn say_goodbye(self, reason: Reason, why: &'static str) {
        if self.was_greeted() {
            lock(&self.core).condemn(Violation(reason, why));
        }
        self.write_rest().await;
    }

    /// Writes what there is, if the other side reads it soon.
    pub(crate) async fn write_rest(mut self) {
        // One that does not read is left without.
        let _ = timeout(FAREWELL, poll_fn(|cx| self.poll_write(cx))).await;
    }
}

impl Responding {
    /// Begins the answer, or if `ended` gives all of it.
    ///
    /// # Errors
    /// If the caller has gone.
    pub(crate) fn respond(self, head: &response::Parts, ended: bool) -> Result<Sending, Error> {
        self.0.respond(head, ended)?;
        Ok(self.0)
    }

    /// Ready when the caller wants no answer any more.
    pub(crate) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll_gone(cx)
    }

    /// Resets the stream.
    pub(crate) fn reset(mut self, reason: Reason) {
        self.0.reset(reason);
    }
}
