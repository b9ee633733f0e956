//! The gateway's listeners: a unix socket for cells on this node, and TCP for others.

use std::{
    fs::Permissions,
    io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kiyot_link::stream::Stream;
use tokio::{
    net::{TcpListener, UnixListener},
    time::{Instant, sleep},
};

use super::{conn_limit::ConnLimit, handshake::establish, peer::Peer, shared::Shared};

/// The pause after an error of `accept`, which is mostly EMFILE.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The pause between attempts to listen on a port that is in use.
pub(super) const LISTEN_PAUSE: Duration = Duration::from_secs(2);

/// A listening socket. Dropping it removes a unix socket's file.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl Listener {
    /// Binds a unix socket. Replaces an existing file.
    pub(super) fn unix(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        // Independent of the umask: only root of a cell dials.
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(Self::Unix(listener, path.to_owned()))
    }

    /// Binds a TCP port. Also returns the bound address, with the port that the kernel chose.
    pub(super) async fn tcp(address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok((Self::Tcp(listener), bound))
    }

    async fn accept(&self, ipv6_peer_bits: u8) -> io::Result<(Stream, Peer)> {
        match self {
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                let peer = Peer::of(&stream);
                Ok((Stream::Unix(stream), peer))
            }
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Ok((Stream::over_tcp(stream)?, Peer::at(address.ip(), ipv6_peer_bits)))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // The next gateway replaces a remaining file.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Waits until a TCP port is free, and returns its listener.
pub(super) async fn awaited(address: SocketAddr) -> Listener {
    loop {
        sleep(LISTEN_PAUSE).await;
        if let Ok((listener, _)) = Listener::tcp(address).await {
            tracing::info!(%address, "gateway listens");
            return listener;
        }
    }
}

/// Accepts connections until the gateway shuts down. Each listener has its own limit: a flood from
/// other machines leaves this node's cells their connections.
pub(super) async fn run(listener: Listener, conn_limit: ConnLimit, shared: Arc<Shared>) {
    let ipv6_peer_bits = shared.limits.ipv6_peer_bits;
    loop {
        let accepted =
            match shared.shutdown.run_until_cancelled(listener.accept(ipv6_peer_bits)).await {
                None => return,
                Some(accepted) => accepted,
            };
        match accepted {
            Ok((stream, peer)) => {
                let Some(permit) = conn_limit.acquire(peer.clone(), Instant::now()) else {
                    if let Some(suppressed) = shared.log.conn_limit.admit() {
                        tracing::warn!(
                            ?peer,
                            suppressed,
                            "unauthenticated connection limit reached, in total or of a peer"
                        );
                    }
                    continue;
                };
                let sequence = shared.sequence.fetch_add(1, Ordering::Relaxed);
                let own = shared.clone();
                shared.tasks.spawn(async move {
                    // Boxed, so that the memory of the handshake is freed before the connection
                    // runs.
                    let establish = Box::pin(
                        own.shutdown.run_until_cancelled(establish(stream, permit, sequence, &own)),
                    );
                    if let Some(Some(admitted)) = establish.await {
                        admitted.run(&own).await;
                    }
                });
            }
            // A peer that resets its connections must not delay other peers.
            Err(error) if is_of_peer(&error) => {}
            Err(error) => {
                if let Some(suppressed) = shared.log.accept.admit() {
                    tracing::warn!(%error, suppressed, "gateway could not accept a connection");
                }
                shared.shutdown.run_until_cancelled(sleep(ACCEPT_BACKOFF)).await;
            }
        }
    }
}

/// Returns whether an error of `accept` concerns only the accepted connection (accept(2)).
fn is_of_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, InvalidInput, NetworkDown,
        NetworkUnreachable, NotConnected,
    };
    matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionReset
            | HostUnreachable
            | InvalidInput
            | NetworkDown
            | NetworkUnreachable
            | NotConnected
    )
}
