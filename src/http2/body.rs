//! What both ends have of a stream: handles of what comes and of what goes.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, response};

use super::{Reason, core::Core, error::Error, streams::Key};

/// Half of a stream. When all are dropped before the call has ended, it is cancelled.
#[derive(Debug)]
pub(super) struct Handle {
    core: Arc<Mutex<Core>>,
    key: Key,
}

/// The body that comes: of an answer, or of a request. What is taken of it makes room for more.
#[derive(Debug)]
pub struct Receiving(Handle);

/// The body that goes.
#[derive(Debug)]
pub struct Sending(Handle);

pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    /// One that the stream counts already.
    pub(super) fn new(core: &Arc<Mutex<Core>>, key: Key) -> Self {
        Self { core: core.clone(), key }
    }

    /// The connection, and which of its streams it is.
    pub(super) fn core(&self) -> (MutexGuard<'_, Core>, Key) {
        (lock(&self.core), self.key)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let (mut core, key) = self.core();
        core.let_go(key);
    }
}

impl Receiving {
    pub(super) fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// What came since it was asked last; `None` behind the last part.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        let (mut core, key) = self.0.core();
        core.poll_data(key, cx.waker())
    }

    /// The same, waiting for it.
    pub async fn data(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }

    /// The trailers, behind the last part of the body; `None` if there are none.
    pub fn poll_trailers(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, Error>> {
        let (mut core, key) = self.0.core();
        core.poll_trailers(key, cx.waker())
    }

    /// The same, waiting for it.
    pub async fn trailers(&mut self) -> Result<Option<HeaderMap>, Error> {
        poll_fn(|cx| self.poll_trailers(cx)).await
    }

    /// Whether there is nothing more to come, and no error.
    pub fn is_end(&self) -> bool {
        let (mut core, key) = self.0.core();
        core.has_ended(key)
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        let (mut core, key) = self.0.core();
        core.ignore(key);
    }
}

impl Sending {
    pub(super) fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// Begins an answer with its head; `ended` if that is all.
    pub(super) fn respond(&self, head: &response::Parts, ended: bool) -> Result<(), Error> {
        let (mut core, key) = self.0.core();
        core.respond(key, head, ended)
    }

    /// Ready when all that was given was sent; an error if the other side wants no more.
    pub fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let (mut core, key) = self.0.core();
        core.poll_sent(key, cx.waker())
    }

    /// How much of what was given last was not sent. Bytes.
    pub(crate) fn unsent(&self) -> usize {
        let (mut core, key) = self.0.core();
        core.unsent(key)
    }

    /// Gives the next part; the one before must have been sent.
    pub fn give(&mut self, part: Bytes) {
        let (mut core, key) = self.0.core();
        core.give(key, part);
    }

    /// Says that what was given is all, but for trailers.
    pub fn end(&mut self, trailers: Option<HeaderMap>) {
        let (mut core, key) = self.0.core();
        core.give_end(key, trailers);
    }

    /// Ready when the other side wants nothing of the stream any more.
    pub(crate) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (mut core, key) = self.0.core();
        core.poll_gone(key, cx)
    }

    /// Resets the stream.
    pub(crate) fn reset(&mut self, reason: Reason) {
        let (mut core, key) = self.0.core();
        core.reset(key, reason, Error::GivenUp);
    }
}
