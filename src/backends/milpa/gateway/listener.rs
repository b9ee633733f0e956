//! The one port: accepts, and finds out what is spoken.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kiyot_link::{alpn, bootstrap::GatewayAddress, http2, stream::Stream};
use kiyot_proto::cell::ConnectionKind;
use rustls::server::Acceptor;
use tokio::{
    net::{TcpListener, UnixListener},
    time::{sleep, timeout},
};
use tokio_rustls::LazyConfigAcceptor;

use super::{
    admit::{self, Admitted},
    newcomers::Place,
    peer::Peer,
    shared::Shared,
};

/// How long the listener rests after the kernel gave it no connection (out of file descriptors,
/// mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The listening socket. A unix socket's file goes with it.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl Listener {
    /// Begins to listen. A socket file that is left over is replaced.
    pub(super) async fn bind(address: &GatewayAddress) -> io::Result<Self> {
        match address {
            GatewayAddress::Unix(path) => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                let listener = UnixListener::bind(path)?;
                // Whatever the umask: who dials is the cells' root, and nobody else need be held
                // off.
                std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
                Ok(Self::Unix(listener, path.clone()))
            }
            GatewayAddress::Tcp(address) => TcpListener::bind(address).await.map(Self::Tcp),
        }
    }

    /// Where it listens: with the port that the kernel chose.
    pub(super) fn address(&self) -> io::Result<GatewayAddress> {
        match self {
            Self::Unix(_, path) => Ok(GatewayAddress::Unix(path.clone())),
            Self::Tcp(listener) => listener.local_addr().map(GatewayAddress::Tcp),
        }
    }

    async fn accept(&self) -> io::Result<(Stream, Peer)> {
        match self {
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                let peer = Peer::of(&stream);
                Ok((Stream::Unix(stream), peer))
            }
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), Peer::Address(peer.ip().to_canonical())))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Whoever finds it later replaces it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Accepts until the gateway ends.
pub(super) async fn run(listener: Listener, shared: Arc<Shared>) {
    loop {
        let accepted = match shared.end.run_until_cancelled(listener.accept()).await {
            None => return,
            Some(accepted) => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Some(place) = shared.newcomers.place(peer.clone()) else {
                    if let Some(suppressed) = shared.log.excess.admit() {
                        tracing::warn!(
                            ?peer,
                            suppressed,
                            "unauthenticated connection limit reached, in all or of one peer"
                        );
                    }
                    continue;
                };
                let arrival = shared.arrivals.fetch_add(1, Ordering::Relaxed);
                let own = shared.clone();
                shared.tasks.spawn(async move {
                    // What the way in needs is given back before the connection is carried.
                    let way_in = Box::pin(
                        own.end.run_until_cancelled(come_in(stream, place, arrival, &own)),
                    );
                    if let Some(Some(admitted)) = way_in.await {
                        admitted.carry(&own).await;
                    }
                });
            }
            Err(error) => {
                if let Some(suppressed) = shared.log.accept.admit() {
                    tracing::warn!(%error, suppressed, "The gateway could not accept a connection.");
                }
                shared.end.run_until_cancelled(sleep(ACCEPT_PAUSE)).await;
            }
        }
    }
}

/// A connection from its first byte until it is admitted, or has enrolled.
async fn come_in(stream: Stream, place: Place, arrival: u64, shared: &Shared) -> Option<Admitted> {
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let hello = start.client_hello();
        // Strict where both are offered.
        let kind = match hello.server_name() {
            Some(alpn::BULK_NAME) => ConnectionKind::Bulk,
            _ => ConnectionKind::Control,
        };
        let offered = hello.alpn().map(|all| {
            all.fold((false, false), |(cell, enrol), one| {
                (cell || one == alpn::CELL, enrol || one == alpn::ENROL)
            })
        });
        let (kind, config) = match offered {
            Some((true, _)) => (Some(kind), shared.cell_tls.clone()),
            // An unknown one is refused by TLS, in words that the other side understands.
            Some((false, _)) => (None, shared.enrol_tls.clone()),
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, "no ALPN")),
        };
        Ok((kind, start.into_stream(config).await?))
    };
    let (kind, stream) = match timeout(shared.limits.handshake, handshake).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => {
            if by_the_clock(&error) {
                if let Some(suppressed) = shared.log.clock.admit() {
                    tracing::warn!(%error, suppressed, "A cell's certificate has ended by this node's clock; its key gets a new one. Was the clock set?");
                }
            } else if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(%error, suppressed, "A connection to the gateway failed in its handshake.");
            }
            return None;
        }
        Err(_) => {
            if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(
                    suppressed,
                    "A connection to the gateway was too slow in its handshake."
                );
            }
            return None;
        }
    };
    let Some(kind) = kind else {
        let served = http2::serve(
            stream,
            http2::Profile::ENROL,
            shared.enrolment.clone().service(),
            shared.end.clone(),
            shared.tasks.clone(),
        );
        if timeout(shared.limits.enrolment, served).await.is_err()
            && let Some(suppressed) = shared.log.handshake.admit()
        {
            tracing::debug!(suppressed, "A connection for enrolment took too long.");
        }
        return None;
    };
    // Twice: HTTP/2 and the answer to Hello, which has the same limit of its own.
    let admitted =
        match timeout(shared.limits.handshake * 2, admit::admit(stream, kind, arrival, shared))
            .await
        {
            Ok(Ok(admitted)) => Some(admitted),
            Ok(Err(error)) => {
                if let Some(suppressed) = shared.log.connection.admit() {
                    tracing::info!(
                        error = &error as &dyn std::error::Error,
                        suppressed,
                        "A connection with a certificate was not let in."
                    );
                }
                None
            }
            Err(_) => {
                if let Some(suppressed) = shared.log.connection.admit() {
                    tracing::info!(suppressed, "A connection with a certificate was too slow.");
                }
                None
            }
        };
    drop(place);
    admitted
}

/// Whether a handshake failed for the time of day only.
fn by_the_clock(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(problem)) = error else { return false };
    use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(problem, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}
