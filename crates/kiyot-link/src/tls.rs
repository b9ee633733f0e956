//! TLS of the link: version 1.3 only, with ring, and without session resumption, so that each
//! connection of a cell is verified.

use std::sync::{Arc, OnceLock};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};

use crate::{alpn, certificate::sha256, clock::Clock};

/// The most certificates of a chain among which the authority's is searched.
const MAX_CHAIN_CERTIFICATES: usize = 4;

/// A certificate chain and its key, each in DER form. Holds a secret, which `Debug` omits.
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

impl Identity {
    /// Creates an identity from a chain, the end-entity certificate first, and a PKCS #8 key.
    pub fn new(chain: Vec<Vec<u8>>, pkcs8: Vec<u8>) -> Self {
        Self {
            chain: chain.into_iter().map(CertificateDer::from).collect(),
            key: PrivatePkcs8KeyDer::from(pkcs8).into(),
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(ring::default_provider())).clone()
}

/// Returns the agent's configuration for [`alpn::ENROL`]: no client certificate; the authority with
/// this fingerprint must have issued the gateway's certificate.
pub fn enrol_client(ca_sha256: &str) -> Result<ClientConfig, Error> {
    let config =
        ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    Ok(client(
        config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedAuthority::new(ca_sha256)))
            .with_no_client_auth(),
        alpn::ENROL,
    ))
}

/// Returns the agent's configuration for [`alpn::CELL`].
pub fn cell_client(ca_sha256: &str, identity: Identity) -> Result<ClientConfig, Error> {
    let config =
        ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let config = config
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedAuthority::new(ca_sha256)));
    Ok(client(config.with_client_auth_cert(identity.chain, identity.key)?, alpn::CELL))
}

fn client(mut config: ClientConfig, protocol: &[u8]) -> ClientConfig {
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
    config
}

/// Returns the gateway's configuration for [`alpn::ENROL`]. The chain must include the authority's
/// certificate.
pub fn enrol_server(identity: Identity) -> Result<ServerConfig, Error> {
    anonymous_server(identity, alpn::ENROL)
}

/// Returns the gateway's configuration for [`alpn::DOWNLOAD`].
pub fn download_server(identity: Identity) -> Result<ServerConfig, Error> {
    anonymous_server(identity, alpn::DOWNLOAD)
}

/// Returns a configuration that requires no client certificate.
fn anonymous_server(identity: Identity, protocol: &[u8]) -> Result<ServerConfig, Error> {
    let config =
        ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let config = config.with_no_client_auth().with_single_cert(identity.chain, identity.key)?;
    Ok(server(config, protocol))
}

/// Returns the gateway's configuration for [`alpn::CELL`]: this authority must have issued the
/// client's certificate, which must be valid by this clock.
pub fn cell_server(identity: Identity, ca_der: &[u8], clock: Clock) -> Result<ServerConfig, Error> {
    let verifier = WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(CertificateDer::from(ca_der.to_vec()))?),
        provider(),
    )
    .build()
    .map_err(|error| Error::General(error.to_string()))?;
    let config =
        ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    let mut config = config
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain, identity.key)?;
    config.time_provider = Arc::new(clock);
    Ok(server(config, alpn::CELL))
}

fn server(mut config: ServerConfig, protocol: &[u8]) -> ServerConfig {
    config.alpn_protocols = vec![protocol.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config
}

fn roots(authority: CertificateDer<'static>) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority)?;
    Ok(roots)
}

/// A verifier that trusts the authority with a pinned fingerprint. The gateway sends the
/// authority's certificate after its own.
#[derive(Debug)]
struct PinnedAuthority {
    sha256: String,
}

impl PinnedAuthority {
    fn new(sha256: &str) -> Self {
        Self { sha256: sha256.to_ascii_lowercase() }
    }
}

impl ServerCertVerifier for PinnedAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let authority = intermediates
            .iter()
            .take(MAX_CHAIN_CERTIFICATES)
            .find(|certificate| sha256(certificate) == self.sha256);
        let authority =
            authority.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let verifier = WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots(authority.clone().into_owned())?),
            provider(),
        );
        let verifier = verifier.build().map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not supported".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &provider().signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        None
    }
}
