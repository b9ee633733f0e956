//! The certificate authority for the cells of a node.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use kiyot_engine::{StoreError, id::CellId};
use kiyot_link::{
    alpn,
    certificate::{Certificate, InvalidCertificate, sha256},
    tls::Identity,
};
use kiyot_proto::store::CertificateAuthority;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PublicKeyData, SerialNumber,
    SubjectPublicKeyInfo,
};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509CertificationRequest};

use crate::backends::milpa::store::{Batch, Store, Table};

/// The authority's key in [`Table::Node`].
const RECORD_KEY: &str = "ca";

/// The `notBefore` of all certificates: 1970. Clocks differ and may be set back, and a later date
/// adds no security.
const NOT_BEFORE: SystemTime = SystemTime::UNIX_EPOCH;

/// The `notAfter` of the authority's and the gateway's certificates, after [`NOT_BEFORE`]:
/// 9999-12-31T23:59:59Z, which means no expiry (RFC 5280, 4.1.2.5).
///
/// Cells pin the authority's fingerprint, which they get with their token. An expiry adds nothing
/// to the pin, and a wrong clock of the node or of a cell must not separate them. The gateway's
/// certificate is issued at each start of the daemon.
const NO_EXPIRY: Duration = Duration::from_secs(253_402_300_799);

/// The length of a line of base64 in PEM form.
const PEM_LINE_CHARS: usize = 64;

/// The default lifetime of a cell's certificate.
pub const CELL_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);

/// A certificate authority. `Debug` omits its key.
pub struct Ca {
    certificate_der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ca").field("sha256", &self.sha256()).finish_non_exhaustive()
    }
}

/// An error of loading the authority or of issuing a certificate.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The store failed.
    #[error("record of the certificate authority")]
    Store(#[source] StoreError),
    /// The record is not a certificate authority.
    #[error("invalid record of the certificate authority")]
    Record(#[source] rcgen::Error),
    /// A key or a certificate could not be created.
    #[error("creating a key or a certificate")]
    Create(#[source] rcgen::Error),
    /// An issued certificate can't be parsed.
    #[error("parsing an issued certificate")]
    Read(#[source] InvalidCertificate),
    /// The kernel returned no random bytes.
    #[error("no random bytes from the kernel")]
    Randomness,
}

/// An error of a certificate request (CSR).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("certificate request: {0}")]
pub struct InvalidRequest(&'static str);

/// A public key whose owner has proven possession of the private key.
#[derive(Debug, Clone)]
pub struct ProvenKey(SubjectPublicKeyInfo);

impl ProvenKey {
    /// Parses a certificate request (CSR) in DER form and verifies its signature. Ignores
    /// everything else in the request: names, usages, extensions.
    pub fn from_request(der: &[u8]) -> Result<Self, InvalidRequest> {
        let (rest, request) = X509CertificationRequest::from_der(der)
            .map_err(|_| InvalidRequest("not in DER form"))?;
        if !rest.is_empty() {
            return Err(InvalidRequest("trailing bytes"));
        }
        let key =
            SubjectPublicKeyInfo::from_der(request.certification_request_info.subject_pki.raw)
                .map_err(|_| InvalidRequest("unknown key algorithm"))?;
        // Before the signature is verified, because other algorithms may be slow.
        if key.algorithm() != &PKCS_ECDSA_P256_SHA256 && key.algorithm() != &PKCS_ED25519 {
            return Err(InvalidRequest("key algorithm is neither ECDSA P-256 nor Ed25519"));
        }
        request.verify_signature().map_err(|_| InvalidRequest("not signed by its key"))?;
        Ok(Self(key))
    }

    /// Returns the fingerprint by which [`Admission`](super::Admission) knows the key.
    pub fn sha256(&self) -> String {
        sha256(&self.0.subject_public_key_info())
    }
}

impl Ca {
    /// Loads the node's authority from the store, or creates and stores a new authority.
    pub async fn load_or_make(store: &Store) -> Result<Self, CaError> {
        let records =
            store.load::<CertificateAuthority>(Table::Node).await.map_err(CaError::Store)?;
        if let Some((_, record)) = records.into_iter().find(|(key, _)| key == RECORD_KEY) {
            return Self::from_record(record);
        }
        let (ca, record) = Self::create()?;
        let mut batch = Batch::default();
        batch.put(Table::Node, RECORD_KEY, &record);
        store.commit(batch).await.map_err(CaError::Store)?;
        tracing::info!(sha256 = ca.sha256(), "certificate authority created");
        Ok(ca)
    }

    /// Creates an authority without storing it.
    pub fn new() -> Result<Self, CaError> {
        Ok(Self::create()?.0)
    }

    fn create() -> Result<(Self, CertificateAuthority), CaError> {
        let mut params = params("kiyot cells", NOT_BEFORE + NO_EXPIRY)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Create)?;
        let certificate_der = params.self_signed(&key).map_err(CaError::Create)?.der().to_vec();
        let record = CertificateAuthority {
            certificate_der: certificate_der.clone().into(),
            key_pkcs8_der: key.serialize_der().into(),
        };
        Ok((Self { certificate_der, issuer: Issuer::new(params, key) }, record))
    }

    fn from_record(record: CertificateAuthority) -> Result<Self, CaError> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(record.key_pkcs8_der.to_vec()));
        let key = KeyPair::from_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256)
            .map_err(CaError::Record)?;
        let certificate_der = record.certificate_der.to_vec();
        let issuer = Issuer::from_ca_cert_der(&CertificateDer::from(certificate_der.clone()), key)
            .map_err(CaError::Record)?;
        Ok(Self { certificate_der, issuer })
    }

    /// Returns the fingerprint that cells pin.
    pub fn sha256(&self) -> String {
        sha256(&self.certificate_der)
    }

    /// Returns the certificate in DER form.
    pub fn certificate_der(&self) -> &[u8] {
        &self.certificate_der
    }

    /// Returns the certificate in PEM form (RFC 7468), as curl and openssl read it.
    pub fn certificate_pem(&self) -> String {
        let encoded = BASE64_STANDARD.encode(&self.certificate_der);
        let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
        let mut rest = encoded.as_str();
        while !rest.is_empty() {
            let (line, next) = rest.split_at(rest.len().min(PEM_LINE_CHARS));
            pem.push_str(line);
            pem.push('\n');
            rest = next;
        }
        pem.push_str("-----END CERTIFICATE-----\n");
        pem
    }

    /// Issues a certificate for a cell: for TLS clients only, with the cell's id as common name.
    pub fn certify(
        &self,
        now: SystemTime,
        cell: &CellId,
        key: &ProvenKey,
        lifetime: Duration,
    ) -> Result<Vec<u8>, CaError> {
        let mut params = params(cell.as_str(), now + lifetime)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let der = params.signed_by(&key.0, &self.issuer).map_err(CaError::Create)?.der().to_vec();
        // Admission relies on the certificate's fields: they must match the cell and key for which
        // the token was spent.
        let read = Certificate::read(&der).map_err(CaError::Read)?;
        debug_assert_eq!(read.key_sha256, key.sha256());
        Ok(der)
    }

    /// Creates a key and issues a certificate for the gateway: for TLS servers only, with its fixed
    /// DNS names.
    pub fn gateway_identity(&self) -> Result<Identity, CaError> {
        let mut params = params("kiyot gateway", NOT_BEFORE + NO_EXPIRY)?;
        params.subject_alt_names =
            CertificateParams::new([alpn::GATEWAY_NAME.to_owned(), alpn::BULK_NAME.to_owned()])
                .map_err(CaError::Create)?
                .subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Create)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(CaError::Create)?;
        Ok(Identity::new(
            vec![certificate.der().to_vec(), self.certificate_der.clone()],
            key.serialize_der(),
        ))
    }
}

fn params(common_name: &str, not_after: SystemTime) -> Result<CertificateParams, CaError> {
    let mut serial = [0_u8; 16];
    SystemRandom::new().fill(&mut serial).map_err(|_| CaError::Randomness)?;
    // RFC 5280 requires a positive serial number.
    serial[0] &= 0x7f;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = NOT_BEFORE.into();
    params.not_after = not_after.into();
    Ok(params)
}

#[cfg(test)]
mod tests;
