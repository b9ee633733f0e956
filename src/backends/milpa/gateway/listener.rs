//! The gateway's listener: accepts connections, performs the TLS handshake, and dispatches by ALPN
//! and SNI.

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
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};

use super::{
    admission::{self, Admitted},
    conn_limit::ConnPermit,
    peer::Peer,
    shared::Shared,
};

/// The pause after an error of `accept`, which mostly is EMFILE.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The listening socket. Dropping it removes a unix socket's file.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl Listener {
    /// Binds the address. A socket file that exists is replaced.
    pub(super) async fn bind(address: &GatewayAddress) -> io::Result<Self> {
        match address {
            GatewayAddress::Unix(path) => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                let listener = UnixListener::bind(path)?;
                // Independent of the umask: only root of a cell dials.
                std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
                Ok(Self::Unix(listener, path.clone()))
            }
            GatewayAddress::Tcp(address) => TcpListener::bind(address).await.map(Self::Tcp),
        }
    }

    /// Returns the bound address, with the port that the kernel chose.
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
            // The next gateway replaces a file that is left.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Accepts connections until the gateway shuts down.
pub(super) async fn run(listener: Listener, shared: Arc<Shared>) {
    loop {
        let accepted = match shared.shutdown.run_until_cancelled(listener.accept()).await {
            None => return,
            Some(accepted) => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Some(permit) = shared.conn_limit.acquire(peer.clone()) else {
                    if let Some(suppressed) = shared.log.conn_limit.admit() {
                        tracing::warn!(
                            ?peer,
                            suppressed,
                            "unauthenticated connection limit reached, in all or of one peer"
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
            Err(error) => {
                if let Some(suppressed) = shared.log.accept.admit() {
                    tracing::warn!(%error, suppressed, "gateway could not accept a connection");
                }
                shared.shutdown.run_until_cancelled(sleep(ACCEPT_BACKOFF)).await;
            }
        }
    }
}

/// The use of a connection, by ALPN and SNI.
enum Purpose {
    Enrolment,
    Link(ConnectionKind),
}

/// Performs the handshake of a connection, and then enrols the cell or admits the connection.
async fn establish(
    stream: Stream,
    permit: ConnPermit,
    sequence: u64,
    shared: &Shared,
) -> Option<Admitted> {
    let (purpose, stream) = handshake(stream, shared).await?;
    match purpose {
        Purpose::Enrolment => {
            serve_enrolment(stream, shared).await;
            None
        }
        Purpose::Link(kind) => {
            let admitted = admit(stream, kind, sequence, shared).await;
            drop(permit);
            admitted
        }
    }
}

/// Performs the TLS handshake. Logs an error and returns `None`.
async fn handshake(stream: Stream, shared: &Shared) -> Option<(Purpose, TlsStream<Stream>)> {
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let hello = start.client_hello();
        let kind = match hello.server_name() {
            Some(alpn::BULK_NAME) => ConnectionKind::Bulk,
            _ => ConnectionKind::Control,
        };
        let offers_cell =
            hello.alpn().map(|mut protocols| protocols.any(|protocol| protocol == alpn::CELL));
        let (purpose, config) = match offers_cell {
            // The stricter protocol, if both are offered.
            Some(true) => (Purpose::Link(kind), shared.cell_tls.clone()),
            // Unknown protocols get TLS's alert no_application_protocol.
            Some(false) => (Purpose::Enrolment, shared.enrol_tls.clone()),
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, "no ALPN")),
        };
        Ok((purpose, start.into_stream(config).await?))
    };
    match timeout(shared.limits.handshake, handshake).await {
        Ok(Ok(established)) => Some(established),
        Ok(Err(error)) => {
            if is_outside_validity(&error) {
                if let Some(suppressed) = shared.log.expiry.admit() {
                    tracing::warn!(
                        %error,
                        suppressed,
                        "certificate of a cell has expired by this node's clock, its key gets a \
                         new one; was the clock set?"
                    );
                }
            } else if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(%error, suppressed, "TLS handshake failed");
            }
            None
        }
        Err(_) => {
            if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(suppressed, "TLS handshake timed out");
            }
            None
        }
    }
}

async fn serve_enrolment(stream: TlsStream<Stream>, shared: &Shared) {
    let served = http2::serve(
        stream,
        http2::Profile::ENROL,
        shared.enrolment.clone().service(),
        shared.shutdown.clone(),
        shared.tasks.clone(),
    );
    if timeout(shared.limits.enrolment, served).await.is_err()
        && let Some(suppressed) = shared.log.handshake.admit()
    {
        tracing::debug!(suppressed, "connection for enrolment timed out");
    }
}

/// Admits a connection. Logs an error and returns `None`.
async fn admit(
    stream: TlsStream<Stream>,
    kind: ConnectionKind,
    sequence: u64,
    shared: &Shared,
) -> Option<Admitted> {
    // Twice the limit: HTTP/2 and the reply to Hello, which has the same limit of its own.
    let limit = shared.limits.handshake * 2;
    match timeout(limit, admission::admit(stream, kind, sequence, shared)).await {
        Ok(Ok(admitted)) => Some(admitted),
        Ok(Err(error)) => {
            if let Some(suppressed) = shared.log.admission.admit() {
                let error = &error as &dyn std::error::Error;
                tracing::info!(error, suppressed, "connection with a certificate not admitted");
            }
            None
        }
        Err(_) => {
            if let Some(suppressed) = shared.log.admission.admit() {
                tracing::info!(suppressed, "connection with a certificate timed out");
            }
            None
        }
    }
}

/// Returns whether a handshake failed because the certificate is not valid at this time.
fn is_outside_validity(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(problem)) = error else { return false };
    use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(problem, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}
