//! Certificates of a simulated API server.

use std::{net::Ipv4Addr, sync::Arc};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
    },
};

/// An authority with a server certificate for 127.0.0.1.
pub(super) struct Authority {
    /// The certificate of the authority, PEM.
    pub(super) certificate: String,
    server: CertificateDer<'static>,
    key: Vec<u8>,
}

impl Authority {
    pub(super) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let server_key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress(Ipv4Addr::LOCALHOST.into())];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let server = params.signed_by(&server_key, &issuer).unwrap();
        Self {
            certificate: authority.pem(),
            server: server.der().clone(),
            key: server_key.serialize_der(),
        }
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()));
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![self.server.clone()], key)
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}
