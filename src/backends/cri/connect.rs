//! Connecting to a container runtime.

use std::{io, path::Path, time::Duration};

use kiyot_http2::{
    Error,
    client::{self, Connection, SendRequest},
};
use tokio::net::UnixStream;

/// Pause before the next attempt while the server's backlog is full.
const FULL_BACKLOG_PAUSE: Duration = Duration::from_millis(10);

/// A failed connection attempt.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Connecting the socket failed.
    #[error("the socket can't be connected")]
    Socket(#[source] io::Error),
    /// The server does not speak HTTP/2.
    #[error("the server on the socket does not speak HTTP/2")]
    Handshake(#[source] Error),
}

async fn socket(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            // The backlog of a unix socket is full. A blocking connect would wait for room.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(FULL_BACKLOG_PAUSE).await
            }
            result => return result,
        }
    }
}

/// Connects, and waits for the server's preface. No PINGs are sent afterwards, because grpc-go
/// closes connections of clients that send them often.
pub(super) async fn open(path: &Path) -> Result<(SendRequest, Connection), ConnectError> {
    let stream = socket(path).await.map_err(ConnectError::Socket)?;
    client::handshake(stream).await.map_err(ConnectError::Handshake)
}
