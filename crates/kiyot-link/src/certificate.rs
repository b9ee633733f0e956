//! The fields of an X.509 certificate that the link uses.

use std::time::{Duration, SystemTime};

use ring::digest::{SHA256, digest};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Returns the SHA-256 digest in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest(&SHA256, bytes))
}

/// The fields of a certificate that identify a cell and bound its validity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The subject's common name: a cell's id in a cell's certificate.
    pub common_name: String,
    /// [`sha256`] of the public key (SubjectPublicKeyInfo in DER form).
    pub key_sha256: String,
    /// The start of its validity.
    pub not_before: SystemTime,
    /// The end of its validity.
    pub not_after: SystemTime,
}

/// An error of parsing a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid certificate: {0}")]
pub struct InvalidCertificate(&'static str);

impl Certificate {
    /// Parses a certificate in DER form. Verifies no signature: TLS has done that.
    pub fn read(der: &[u8]) -> Result<Self, InvalidCertificate> {
        let (rest, parsed) =
            X509Certificate::from_der(der).map_err(|_| InvalidCertificate("not in DER form"))?;
        if !rest.is_empty() {
            return Err(InvalidCertificate("trailing bytes"));
        }
        let mut names = parsed.subject().iter_common_name();
        let common_name = names
            .next()
            .and_then(|name| name.as_str().ok())
            .ok_or(InvalidCertificate("no common name"))?;
        if names.next().is_some() {
            return Err(InvalidCertificate("several common names"));
        }
        Ok(Self {
            common_name: common_name.to_owned(),
            key_sha256: sha256(parsed.public_key().raw),
            not_before: time(parsed.validity().not_before.timestamp()),
            not_after: time(parsed.validity().not_after.timestamp()),
        })
    }
}

fn time(unix: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(unix).unwrap_or(0))
}
