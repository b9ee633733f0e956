//! A client's connection: begins calls, and hears answers.

use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Response, request::Parts};
use tokio::net::UnixStream;

use super::{
    body::{Handle, Receiving, Sending, lock},
    core::Core,
    error::Error,
    line::Line,
};

/// A connection that calls can be begun on.
#[derive(Debug, Clone)]
pub(crate) struct Client(Arc<Mutex<Core>>);

/// The answer to come.
#[derive(Debug)]
pub struct Answering(Option<Handle>);

/// Drives a connection until it ends. When it is dropped, its calls end.
#[derive(Debug)]
pub(crate) struct Connection {
    line: Line,
    core: Arc<Mutex<Core>>,
}

impl Client {
    /// Begins a call, with the first part of its body, or if `ended` all of it.
    ///
    /// # Errors
    /// If the connection takes no new calls. Nothing was sent then.
    pub(crate) fn request(
        &self,
        head: &Parts,
        body: &Bytes,
        ended: bool,
    ) -> Result<(Answering, Sending), Error> {
        let key = lock(&self.0).request(head, body, ended)?;
        Ok((Answering(Some(Handle::new(&self.0, key))), Sending::new(Handle::new(&self.0, key))))
    }
}

impl Future for Answering {
    type Output = Result<Response<Receiving>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(handle) = &self.0 else { return Poll::Ready(Err(Error::GivenUp)) };
        let head = {
            let (mut core, key) = handle.core();
            ready!(core.poll_head(key, cx.waker()))?
        };
        Poll::Ready(
            self.0.take().map(|handle| head.map(|()| Receiving::new(handle))).ok_or(Error::GivenUp),
        )
    }
}

impl Connection {
    /// Of a socket that was connected just now. Nothing is sent before it is driven.
    ///
    /// # Errors
    /// If the socket can't be waited on.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { line: Line::new(stream)?, core: Arc::new(Mutex::new(Core::of_client())) })
    }

    /// To begin calls with.
    pub(crate) fn client(&self) -> Client {
        Client(self.core.clone())
    }

    /// Ready when the other side said something: one that accepts and stays silent is no
    /// connection.
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
        loop {
            match ready!(self.line.poll_read(cx, &self.core)) {
                Ok(true) => {}
                Ok(false) => {
                    return Poll::Ready(if lock(&self.core).is_done() {
                        Ok(())
                    } else {
                        Err(Error::Closed)
                    });
                }
                Err(error) => {
                    // What it did wrong is told if there is room for it.
                    let _ = self.line.poll_write(cx, &self.core);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    fn poll_both(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            if let Poll::Ready(ended) = self.poll_read(cx) {
                return Poll::Ready(ended);
            }
            let must_write_first = !lock(&self.core).may_read();
            // What the other side sent before it hung up was read above.
            let written =
                self.line.poll_write(cx, &self.core).map_err(|error| Error::Io(Arc::new(error)))?;
            if lock(&self.core).is_done() {
                return Poll::Ready(Ok(()));
            }
            if !must_write_first || written.is_pending() {
                return Poll::Pending;
            }
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
