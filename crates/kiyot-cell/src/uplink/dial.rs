//! TLS connections to the gateway.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use kiyot_link::{
    alpn,
    bootstrap::{Bootstrap, GatewayAddress},
    clock::Clock,
    stream::Stream,
    tls::{self, Identity},
};
use kiyot_proto::cell::ConnectionKind;
use nix::sched::{CloneFlags, setns};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::net::TcpSocket;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Errors of a connection attempt.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// The connection or the TLS handshake failed.
    #[error("connect to the gateway at {0}")]
    Connect(GatewayAddress, #[source] io::Error),
    /// The TLS configuration is invalid.
    #[error("TLS configuration")]
    Tls(#[source] rustls::Error),
    /// The HTTP/2 handshake failed.
    #[error("HTTP/2 to the gateway")]
    Http2(#[source] hyper::Error),
    /// The attempt timed out.
    #[error("timeout after {} s", .0.as_secs())]
    Timeout(Duration),
}

/// Address of the gateway, and the namespace from which the agent reaches it.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    /// The address.
    pub(super) address: GatewayAddress,
    /// The network namespace from which TCP connections are made; `None` for the agent's own.
    pub(super) namespace: Option<PathBuf>,
}

impl Endpoint {
    async fn connect(&self) -> io::Result<Stream> {
        let (GatewayAddress::Tcp(address), Some(namespace)) = (&self.address, &self.namespace)
        else {
            return Stream::dial(&self.address).await;
        };
        let socket = socket_in(namespace, address.is_ipv4())?;
        Stream::over_tcp(socket.connect(*address).await?)
    }
}

/// Returns a TCP socket of a network namespace.
fn socket_in(namespace: &Path, is_ipv4: bool) -> io::Result<TcpSocket> {
    let namespace = File::open(namespace)?;
    // setns(2) affects this thread only, which ends with the call.
    let thread = thread::spawn(move || {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        if is_ipv4 { TcpSocket::new_v4() } else { TcpSocket::new_v6() }
    });
    thread.join().map_err(|_| io::Error::other("thread that opens a socket panicked"))?
}

/// Dials with the cell's certificate.
#[derive(Debug)]
pub(super) struct Dialler {
    endpoint: Endpoint,
    tls: Arc<ClientConfig>,
}

impl Dialler {
    pub(super) fn new(
        endpoint: &Endpoint,
        bootstrap: &Bootstrap,
        identity: Identity,
        clock: &Clock,
    ) -> Result<Self, DialError> {
        let mut tls = tls::cell_client(&bootstrap.ca_sha256, identity).map_err(DialError::Tls)?;
        tls.time_provider = Arc::new(clock.clone());
        Ok(Self { endpoint: endpoint.clone(), tls: Arc::new(tls) })
    }

    pub(super) async fn dial(&self, kind: ConnectionKind) -> Result<TlsStream<Stream>, DialError> {
        let name = if kind == ConnectionKind::Bulk { alpn::BULK_NAME } else { alpn::GATEWAY_NAME };
        dial(&self.endpoint, self.tls.clone(), name).await
    }
}

/// Dials without a certificate, for enrolment.
pub(super) async fn to_enrol(
    endpoint: &Endpoint,
    bootstrap: &Bootstrap,
    clock: &Clock,
) -> Result<TlsStream<Stream>, DialError> {
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).map_err(DialError::Tls)?;
    tls.time_provider = Arc::new(clock.clone());
    dial(endpoint, Arc::new(tls), alpn::GATEWAY_NAME).await
}

async fn dial(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
    name: &'static str,
) -> Result<TlsStream<Stream>, DialError> {
    let failed = |error| DialError::Connect(endpoint.address.clone(), error);
    let name = ServerName::try_from(name).map_err(|error| failed(io::Error::other(error)))?;
    let stream = endpoint.connect().await.map_err(failed)?;
    TlsConnector::from(tls).connect(name, stream).await.map_err(failed)
}
