//! TLS connections to the gateway.

use std::{io, sync::Arc, time::Duration};

use kiyot_link::{
    alpn,
    bootstrap::{Bootstrap, GatewayAddress},
    clock::Clock,
    stream::Stream,
    tls::{self, Identity},
};
use kiyot_proto::cell::ConnectionKind;
use rustls::{ClientConfig, pki_types::ServerName};
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

/// Dials with the cell's certificate.
#[derive(Debug)]
pub(super) struct Dialler {
    address: GatewayAddress,
    tls: Arc<ClientConfig>,
}

impl Dialler {
    pub(super) fn new(
        bootstrap: &Bootstrap,
        identity: Identity,
        clock: &Clock,
    ) -> Result<Self, DialError> {
        let mut tls = tls::cell_client(&bootstrap.ca_sha256, identity).map_err(DialError::Tls)?;
        tls.time_provider = Arc::new(clock.clone());
        Ok(Self { address: bootstrap.gateway.clone(), tls: Arc::new(tls) })
    }

    pub(super) async fn dial(&self, kind: ConnectionKind) -> Result<TlsStream<Stream>, DialError> {
        let name = if kind == ConnectionKind::Bulk { alpn::BULK_NAME } else { alpn::GATEWAY_NAME };
        dial(&self.address, self.tls.clone(), name).await
    }
}

/// Dials without a certificate, for enrolment.
pub(super) async fn to_enrol(
    bootstrap: &Bootstrap,
    clock: &Clock,
) -> Result<TlsStream<Stream>, DialError> {
    let mut tls = tls::enrol_client(&bootstrap.ca_sha256).map_err(DialError::Tls)?;
    tls.time_provider = Arc::new(clock.clone());
    dial(&bootstrap.gateway, Arc::new(tls), alpn::GATEWAY_NAME).await
}

async fn dial(
    address: &GatewayAddress,
    tls: Arc<ClientConfig>,
    name: &'static str,
) -> Result<TlsStream<Stream>, DialError> {
    let failed = |error| DialError::Connect(address.clone(), error);
    let name = ServerName::try_from(name).map_err(|error| failed(io::Error::other(error)))?;
    let stream = Stream::dial(address).await.map_err(failed)?;
    TlsConnector::from(tls).connect(name, stream).await.map_err(failed)
}
