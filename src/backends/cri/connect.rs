//! Opens and drives a connection to a container runtime.

use std::{
    future::{Future, poll_fn},
    io,
    path::Path,
    pin::Pin,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use h2::client::{Builder, Connection, SendRequest};
use tokio::net::UnixStream;

use super::{
    CONNECTION_WINDOW, MAX_HEADER_LIST, RESET_STREAM_DURATION, RESET_STREAMS, STREAM_WINDOW,
    wire::{Tap, Wire},
};

/// How long to wait while the server's queue of connections is full.
const QUEUE_FULL_WAIT: Duration = Duration::from_millis(10);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket can't be connected to.
    #[error("the socket can't be connected to")]
    Socket(#[source] io::Error),
    /// What listens there does not speak HTTP/2.
    #[error("what listens there does not speak HTTP/2")]
    Handshake(#[source] h2::Error),
    /// It hung up before it said anything.
    #[error("it hung up at once")]
    HungUp,
}

/// A connection and the future that drives it.
pub(super) struct Opened {
    pub(super) send: SendRequest<Bytes>,
    pub(super) connection: Connection<Wire, Bytes>,
    pub(super) tap: Tap,
}

async fn socket(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            // A unix socket says so when its backlog is full; waiting for room is what a blocking connect would do.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(QUEUE_FULL_WAIT).await,
            result => return result,
        }
    }
}

/// Connects, and waits until the server said something: one that accepts and stays silent is no connection.
pub(super) async fn open(path: &Path) -> Result<Opened, ConnectError> {
    let (wire, tap) = socket(path).await.and_then(Wire::of_client).map_err(ConnectError::Socket)?;
    let (send, mut connection) = Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_LIST)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_STREAM_DURATION)
        // The container runtime is trusted to send answers to calls that were cancelled just now.
        .max_local_error_reset_streams(None)
        .enable_push(false)
        .handshake(wire)
        .await
        .map_err(ConnectError::Handshake)?;
    tap.drive();
    poll_fn(|cx| {
        if let Poll::Ready(ended) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(Err(ended.err().map_or(ConnectError::HungUp, ConnectError::Handshake)));
        }
        if let Poll::Ready(Err(error)) = tap.poll_flush(cx) {
            return Poll::Ready(Err(ConnectError::Socket(error)));
        }
        if tap.frames() > 0 { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await?;
    Ok(Opened { send, connection, tap })
}

/// How a connection ended that did not end well.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Protocol(h2::Error),
    #[error("writing failed: {0}")]
    Write(io::Error),
}

/// Drives a connection until it ends. No pings are sent: grpc-go closes connections of clients that ping it often.
pub(super) async fn drive(mut connection: Connection<Wire, Bytes>, tap: Tap) -> Result<(), Broken> {
    poll_fn(|cx| {
        if let Poll::Ready(ended) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(ended.map_err(Broken::Protocol));
        }
        match tap.poll_flush(cx) {
            // What the runtime sent before it hung up was read above.
            Poll::Ready(Err(error)) => Poll::Ready(Err(Broken::Write(error))),
            _ => Poll::Pending,
        }
    })
    .await
}
