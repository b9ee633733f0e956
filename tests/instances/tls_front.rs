//! TLS in front of a registry, with a certificate of its own authority.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

/// A server that terminates TLS and connects its clients to another server.
pub(crate) struct TlsFront {
    at: SocketAddr,
    authority: String,
    _task: AbortOnDropHandle<()>,
}

impl TlsFront {
    /// Starts on another port of the server's address.
    pub(crate) async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((server.ip(), 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (acceptor, authority) = certificate(at.ip());
        let serve_all = async move {
            let mut connections = Vec::new();
            while let Ok((client, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                // A client that does not trust the authority disconnects.
                let serving = async move {
                    let mut client = acceptor.accept(client).await.ok()?;
                    let mut server = TcpStream::connect(server).await.ok()?;
                    copy_bidirectional(&mut client, &mut server).await.ok()
                };
                connections.push(AbortOnDropHandle::new(tokio::spawn(serving)));
            }
        };
        Self { at, authority, _task: AbortOnDropHandle::new(tokio::spawn(serve_all)) }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.at
    }

    /// Returns the authority's certificate, PEM.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }
}

/// Creates an authority and a certificate of a server. Returns the authority's certificate too.
fn certificate(of: IpAddr) -> (TlsAcceptor, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::IpAddress(of)];
    let certificate = params.signed_by(&key, &issuer).unwrap().der().clone();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), authority)
}
