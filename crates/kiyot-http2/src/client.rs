//! Client connections.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Response, request::Parts};
use tokio::net::UnixStream;

use crate::{
    Error,
    body::{RecvStream, SendStream, StreamRef, lock},
    core::Core,
    io::Io,
};

/// Sends requests on a connection.
#[derive(Debug, Clone)]
pub struct SendRequest(Arc<Mutex<Core>>);

/// A response to come.
#[derive(Debug)]
pub struct ResponseFuture(Option<StreamRef>);

/// Drives a connection until it ends. Dropping it aborts all its streams.
#[derive(Debug)]
pub struct Connection {
    io: Io,
    core: Arc<Mutex<Core>>,
}

/// Waits until the server has sent its SETTINGS, so that the handshake with a silent server never
/// completes.
///
/// # Errors
/// For a socket that can't be registered, and a server that closes the connection or doesn't speak
/// HTTP/2.
pub async fn handshake(stream: UnixStream) -> Result<(SendRequest, Connection), Error> {
    let io = Io::new(stream).map_err(|error| Error::Io(Arc::new(error)))?;
    let mut connection = Connection { io, core: Arc::new(Mutex::new(Core::client())) };
    poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
        Poll::Ready(ended) => Poll::Ready(Err(ended.err().unwrap_or(Error::Closed))),
        Poll::Pending if lock(&connection.core).has_received_settings() => Poll::Ready(Ok(())),
        Poll::Pending => Poll::Pending,
    })
    .await?;
    Ok((SendRequest(connection.core.clone()), connection))
}

impl SendRequest {
    /// Sends a request with the first part of its body, or all of it if `end_of_stream`.
    ///
    /// # Errors
    /// For a connection that takes no new requests. Nothing has been sent then.
    pub fn send_request(
        &self,
        head: &Parts,
        body: &Bytes,
        end_of_stream: bool,
    ) -> Result<(ResponseFuture, SendStream), Error> {
        let key = lock(&self.0).send_request(head, body, end_of_stream)?;
        let stream = || StreamRef::new(&self.0, key);
        Ok((ResponseFuture(Some(stream())), SendStream::new(stream())))
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response<RecvStream>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(stream) = &self.0 else { return Poll::Ready(Err(Error::Aborted)) };
        let head = {
            let (mut core, key) = stream.core();
            ready!(core.poll_response(key, cx.waker()))?
        };
        Poll::Ready(
            self.0
                .take()
                .map(|stream| head.map(|()| RecvStream::new(stream)))
                .ok_or(Error::Aborted),
        )
    }
}

impl Connection {
    /// Reads until the socket is empty.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            match ready!(self.io.poll_read(cx, &self.core)) {
                Ok(true) => {}
                Ok(false) => {
                    return Poll::Ready(if lock(&self.core).is_done() {
                        Ok(())
                    } else {
                        Err(Error::Closed)
                    });
                }
                Err(error) => {
                    // The GOAWAY is sent if the socket has room for it.
                    let _ = self.io.poll_write(cx, &self.core);
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
            // Everything that the peer sent before it closed the socket has been read above.
            let written =
                self.io.poll_write(cx, &self.core).map_err(|error| Error::Io(Arc::new(error)))?;
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
            lock(&this.core).close(error);
        }
        ended
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.core).close(&Error::Aborted);
    }
}
