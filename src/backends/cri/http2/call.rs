//! What a caller has of its stream.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Response, request::Parts};

use super::{core::Core, error::Error, streams::Key};

/// A connection that calls can be begun on.
#[derive(Debug, Clone)]
pub(crate) struct Client(pub(super) Arc<Mutex<Core>>);

/// Half of a stream. When all are dropped before the call has ended, it is cancelled.
#[derive(Debug)]
struct Handle {
    core: Arc<Mutex<Core>>,
    key: Key,
}

/// The answer to come.
#[derive(Debug)]
pub struct Answering(Option<Handle>);

/// The body of an answer. What is taken of it makes room for more.
#[derive(Debug)]
pub struct Receiving(Handle);

/// The body of a request.
#[derive(Debug)]
pub struct Sending(Handle);

pub(super) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Begins a call, with the first part of its body, or if `ended` all of it.
    ///
    /// # Errors
    /// If the connection takes no new calls. Nothing was sent then.
    pub(crate) fn request(&self, head: &Parts, body: &Bytes, ended: bool) -> Result<(Answering, Sending), Error> {
        let key = lock(&self.0).request(head, body, ended)?;
        let handle = || Handle { core: self.0.clone(), key };
        Ok((Answering(Some(handle())), Sending(handle())))
    }
}

impl Handle {
    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core().let_go(self.key);
    }
}

impl Future for Answering {
    type Output = Result<Response<Receiving>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(handle) = &self.0 else { return Poll::Ready(Err(Error::GivenUp)) };
        let head = std::task::ready!(handle.core().poll_head(handle.key, cx.waker()))?;
        Poll::Ready(self.0.take().map(|handle| head.map(|()| Receiving(handle))).ok_or(Error::GivenUp))
    }
}

impl Receiving {
    /// What came since it was asked last; `None` behind the last part.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        self.0.core().poll_data(self.0.key, cx.waker())
    }

    /// The same, waiting for it.
    pub async fn data(&mut self) -> Option<Result<Bytes, Error>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }

    /// The trailers, behind the last part of the body; `None` if there are none.
    pub fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<HeaderMap>, Error>> {
        self.0.core().poll_trailers(self.0.key, cx.waker())
    }

    /// The same, waiting for it.
    pub async fn trailers(&mut self) -> Result<Option<HeaderMap>, Error> {
        poll_fn(|cx| self.poll_trailers(cx)).await
    }

    /// Whether there is nothing more of the answer, and no error.
    pub fn is_end(&self) -> bool {
        self.0.core().has_ended(self.0.key)
    }
}

impl Sending {
    /// Ready when all that was given was sent; an error if the other side wants no more.
    pub fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.0.core().poll_sent(self.0.key, cx.waker())
    }

    /// Gives the next part; the one before must have been sent.
    pub fn give(&mut self, part: Bytes) {
        self.0.core().give(self.0.key, part);
    }

    /// Says that what was given is all, but for trailers.
    pub fn end(&mut self, trailers: Option<HeaderMap>) {
        self.0.core().give_end(self.0.key, trailers);
    }
}
