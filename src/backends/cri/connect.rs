//! Opens a connection to a container runtime.

use std::{io, path::Path, time::Duration};

use kiyot_http2::{
    Error,
    client::{self, Connection, SendRequest},
};
use tokio::net::UnixStream;

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
    Handshake(#[source] Error),
}

async fn socket(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            // A unix socket says so when its backlog is full; waiting for room is what a blocking
            // connect would do.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(QUEUE_FULL_WAIT).await
            }
            result => return result,
        }
    }
}

/// Connects, and waits until the server said something. No pings are sent then: grpc-go closes
/// connections of clients that ping it often.
pub(super) async fn open(path: &Path) -> Result<(SendRequest, Connection), ConnectError> {
    let stream = socket(path).await.map_err(ConnectError::Socket)?;
    client::handshake(stream).await.map_err(ConnectError::Handshake)
}
