//! The certificate authority of a node's cells.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use kiyot_link::{
    alpn,
    certificate::{Certificate, NotACertificate, sha256},
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

use crate::backends::milpa::{
    id::CellId,
    store::{Batch, Store, StoreError, Table},
};

/// Where the authority is kept in [`Table::Node`].
const KEY: &str = "ca";

/// When every certificate begins: 1970. Clocks differ, and are set back; and nothing is safer for a
/// certificate that begins when it is made.
const BEGIN: SystemTime = SystemTime::UNIX_EPOCH;

/// When the authority's certificate ends, and the gateway's, which each start of the daemon makes
/// anew: 9999-12-31T23:59:59Z, which means "never" (RFC 5280, 4.1.2.5). Cells know the authority by
/// its fingerprint, which they get with their token: the time of day adds nothing to that, and a
/// clock that is wrong, here or in a cell, must not part the two.
const NEVER: Duration = Duration::from_secs(253_402_300_799);

/// How long a cell's certificate lives, unless it is told otherwise.
pub const CELL_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);

/// The authority. Its `Debug` leaves its key out.
pub struct Ca {
    certificate_der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ca").field("sha256", &self.sha256()).finish_non_exhaustive()
    }
}

/// Why there is no authority, or no certificate of it.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The store could not say or keep it.
    #[error("the certificate authority's record")]
    Store(#[source] StoreError),
    /// What is kept is no authority.
    #[error("the certificate authority that is kept")]
    Kept(#[source] rcgen::Error),
    /// A key or a certificate could not be made.
    #[error("making a key or a certificate")]
    Make(#[source] rcgen::Error),
    /// A certificate that was just made can't be read.
    #[error("reading a certificate that was made")]
    Read(#[source] NotACertificate),
    /// No random bytes from the kernel.
    #[error("no random bytes from the kernel")]
    Randomness,
}

/// A request for a certificate that is not what it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the certificate request {0}")]
pub struct BadRequest(&'static str);

/// A public key whose owner has shown that it has the private one.
#[derive(Debug, Clone)]
pub struct ProvenKey(SubjectPublicKeyInfo);

impl ProvenKey {
    /// From a certificate request in its DER form. Everything else in the request is ignored:
    /// names, usages, extensions.
    pub fn from_request(der: &[u8]) -> Result<Self, BadRequest> {
        let (rest, request) = X509CertificationRequest::from_der(der)
            .map_err(|_| BadRequest("is not one in DER form"))?;
        if !rest.is_empty() {
            return Err(BadRequest("is followed by something"));
        }
        let key =
            SubjectPublicKeyInfo::from_der(request.certification_request_info.subject_pki.raw)
                .map_err(|_| BadRequest("has a key of an unknown kind"))?;
        // Before the signature is looked at: checking one by another algorithm may be slow.
        if key.algorithm() != &PKCS_ECDSA_P256_SHA256 && key.algorithm() != &PKCS_ED25519 {
            return Err(BadRequest("has a key that is neither ECDSA P-256 nor Ed25519"));
        }
        request.verify_signature().map_err(|_| BadRequest("is not signed by its key"))?;
        Ok(Self(key))
    }

    /// The fingerprint by which the ledger knows it.
    pub fn sha256(&self) -> String {
        sha256(&self.0.subject_public_key_info())
    }
}

impl Ca {
    /// The authority of this node: the one that the store keeps, else a new one, which it keeps
    /// before this returns.
    pub async fn load_or_make(store: &Store) -> Result<Self, CaError> {
        let kept = store.load::<CertificateAuthority>(Table::Node).await.map_err(CaError::Store)?;
        if let Some((_, record)) = kept.into_iter().find(|(key, _)| key == KEY) {
            return Self::from_record(record);
        }
        let (ca, record) = Self::make()?;
        let mut batch = Batch::default();
        batch.put(Table::Node, KEY, &record);
        store.commit(batch).await.map_err(CaError::Store)?;
        tracing::info!(
            sha256 = ca.sha256(),
            "Made the certificate authority of this node's cells."
        );
        Ok(ca)
    }

    /// A new authority that nobody keeps.
    pub fn new() -> Result<Self, CaError> {
        Ok(Self::make()?.0)
    }

    fn make() -> Result<(Self, CertificateAuthority), CaError> {
        let mut params = params("kiyot cells", BEGIN + NEVER)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Make)?;
        let certificate_der = params.self_signed(&key).map_err(CaError::Make)?.der().to_vec();
        let record = CertificateAuthority {
            certificate_der: certificate_der.clone().into(),
            key_pkcs8_der: key.serialize_der().into(),
        };
        Ok((Self { certificate_der, issuer: Issuer::new(params, key) }, record))
    }

    fn from_record(record: CertificateAuthority) -> Result<Self, CaError> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(record.key_pkcs8_der.to_vec()));
        let key = KeyPair::from_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256)
            .map_err(CaError::Kept)?;
        let certificate_der = record.certificate_der.to_vec();
        let issuer = Issuer::from_ca_cert_der(&CertificateDer::from(certificate_der.clone()), key)
            .map_err(CaError::Kept)?;
        Ok(Self { certificate_der, issuer })
    }

    /// Its fingerprint: what cells are told before they call.
    pub fn sha256(&self) -> String {
        sha256(&self.certificate_der)
    }

    /// Its certificate in DER form.
    pub fn certificate_der(&self) -> &[u8] {
        &self.certificate_der
    }

    /// A certificate for a cell, made now: for clients only, its common name is the cell's id.
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
        let der = params.signed_by(&key.0, &self.issuer).map_err(CaError::Make)?.der().to_vec();
        // The ledger will be asked by what is read from the certificate: it must be what the token
        // was spent for.
        let read = Certificate::read(&der).map_err(CaError::Read)?;
        debug_assert_eq!(read.key_sha256, key.sha256());
        Ok(der)
    }

    /// A new key and certificate for the gateway: for servers only, under its fixed names.
    pub fn gateway_identity(&self) -> Result<Identity, CaError> {
        let mut params = params("kiyot gateway", BEGIN + NEVER)?;
        params.subject_alt_names =
            CertificateParams::new([alpn::GATEWAY_NAME.to_owned(), alpn::BULK_NAME.to_owned()])
                .map_err(CaError::Make)?
                .subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CaError::Make)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(CaError::Make)?;
        Ok(Identity::new(
            vec![certificate.der().to_vec(), self.certificate_der.clone()],
            key.serialize_der(),
        ))
    }
}

fn params(common_name: &str, end: SystemTime) -> Result<CertificateParams, CaError> {
    let mut serial = [0_u8; 16];
    SystemRandom::new().fill(&mut serial).map_err(|_| CaError::Randomness)?;
    // A serial number is positive.
    serial[0] &= 0x7f;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = BEGIN.into();
    params.not_after = end.into();
    Ok(params)
}

#[cfg(test)]
mod tests;
