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
pub(super) struct StreamRef {
    core: Arc<Mutex<Core>>,
    key: Key,
}

/// The body that comes: of an answer, or of a request. What is taken of it makes room for more.
#[derive(Debug)]
pub struct RecvStream(StreamRef);

/// The body that goes.
#[derive(Debug)]
pub struct SendStream(StreamRef);

pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamRef {
    /// One that the stream counts already.
    pub(super) fn new(core: &Arc<Mutex<Core>>, key: Key) -> Self {
        Self { core: core.clone(), key }
    }

    /// The connection, and which of its streams it is.
    pub(super) fn core(&self) -> (MutexGuard<'_, Core>, Key) {
        (lock(&self.core), self.key)
    }
}

impl Drop for StreamRef {
    fn drop(&mut self) {
        let (mut core, key) = self.core();
        core.drop_stream_ref(key);
    }
}

impl RecvStream {
    pub(super) fn new(handle: StreamRef) -> Self {
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
    pub fn is_end_stream(&self) -> bool {
        let (mut core, key) = self.0.core();
        core.is_end_stream(key)
    }
}

impl Drop for RecvStream {
    fn drop(&mut self) {
        let (mut core, key) = self.0.core();
        core.discard_recv(key);
    }
}

impl SendStream {
    pub(super) fn new(handle: StreamRef) -> Self {
        Self(handle)
    }

    /// Begins an answer with its head; `ended` if that is all.
    pub(super) fn send_response(
        &self,
        head: &response::Parts,
        end_stream: bool,
    ) -> Result<(), Error> {
        let (mut core, key) = self.0.core();
        core.send_response(key, head, end_stream)
    }

    /// Ready when all that was given was sent; an error if the other side wants no more.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let (mut core, key) = self.0.core();
        core.poll_ready(key, cx.waker())
    }

    /// How much of what was given last was not sent. Bytes.
    pub fn unsent_bytes(&self) -> usize {
        let (mut core, key) = self.0.core();
        core.unsent_bytes(key)
    }

    /// Gives the next part; the one before must have been sent.
    pub fn send_data(&mut self, part: Bytes) {
        let (mut core, key) = self.0.core();
        core.send_data(key, part);
    }

    /// Says that what was given is all, but for trailers.
    pub fn finish(&mut self, trailers: Option<HeaderMap>) {
        let (mut core, key) = self.0.core();
        core.finish(key, trailers);
    }

    /// Ready when the other side wants nothing of the stream any more.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (mut core, key) = self.0.core();
        core.poll_reset(key, cx)
    }

    /// Resets the stream.
    pub fn send_reset(&mut self, reason: Reason) {
        let (mut core, key) = self.0.core();
        core.send_reset(key, reason, Error::Aborted);
    }
}
