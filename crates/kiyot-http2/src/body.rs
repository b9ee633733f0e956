//! Halves of streams, for clients and servers.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, response};

use super::{Reason, core::Core, error::Error, streams::Key};

/// Reference to a stream. Dropping the last reference before the stream's end cancels the stream.
#[derive(Debug)]
pub(super) struct StreamRef {
    core: Arc<Mutex<Core>>,
    key: Key,
}

/// Receiving half of a stream. Reading its data releases flow-control capacity.
#[derive(Debug)]
pub struct RecvStream(StreamRef);

/// Sending half of a stream.
#[derive(Debug)]
pub struct SendStream(StreamRef);

pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StreamRef {
    /// Wraps a reference that the stream counts already.
    pub(super) fn new(core: &Arc<Mutex<Core>>, key: Key) -> Self {
        Self { core: core.clone(), key }
    }

    /// Locks the connection's core; returns it with the stream's key.
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

    /// Returns the data received since the last call, and `None` after the last part.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        let (mut core, key) = self.0.core();
        core.poll_data(key, cx.waker())
    }

    /// Waits for [`Self::poll_data`].
    pub async fn data(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }

    /// Returns the trailers after the last part of the body, or `None` if it has no trailers.
    pub fn poll_trailers(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, Error>> {
        let (mut core, key) = self.0.core();
        core.poll_trailers(key, cx.waker())
    }

    /// Waits for [`Self::poll_trailers`].
    pub async fn trailers(&mut self) -> Result<Option<HeaderMap>, Error> {
        poll_fn(|cx| self.poll_trailers(cx)).await
    }

    /// Returns whether the stream has ended without an error, and everything is read.
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

    /// Sends the head of a response.
    pub(super) fn send_response(
        &self,
        head: &response::Parts,
        end_stream: bool,
    ) -> Result<(), Error> {
        let (mut core, key) = self.0.core();
        core.send_response(key, head, end_stream)
    }

    /// Ready when the previous part has been sent. Fails if the peer has reset the stream.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let (mut core, key) = self.0.core();
        core.poll_ready(key, cx.waker())
    }

    /// Returns the bytes of the last part that wait for the peer's window.
    pub fn unsent_bytes(&self) -> usize {
        let (mut core, key) = self.0.core();
        core.unsent_bytes(key)
    }

    /// Sends the next part of the body. The previous part must have been sent
    /// ([`Self::poll_ready`]).
    pub fn send_data(&mut self, part: Bytes) {
        let (mut core, key) = self.0.core();
        core.send_data(key, part);
    }

    /// Ends the body, with trailers or without.
    pub fn finish(&mut self, trailers: Option<HeaderMap>) {
        let (mut core, key) = self.0.core();
        core.finish(key, trailers);
    }

    /// Ready when the peer has reset the stream or its connection has ended.
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
