//! What is read from a certificate.

use std::time::{Duration, SystemTime};

use ring::digest::{SHA256, digest};
use x509_parser::prelude::{FromDer, X509Certificate};

/// SHA-256 in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest(&SHA256, bytes))
}

/// What is used of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Its subject's common name: the cell's id in a cell's certificate.
    pub common_name: String,
    /// [`sha256`] of its public key (the DER form of SubjectPublicKeyInfo).
    pub key_sha256: String,
    /// When it begins to be valid.
    pub not_before: SystemTime,
    /// When it ends.
    pub not_after: SystemTime,
}

/// Not such a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a certificate of kiyot's: {0}")]
pub struct NotACertificate(&'static str);

impl Certificate {
    /// Reads a certificate in its DER form. Checks no signature: that is TLS's part.
    pub fn read(der: &[u8]) -> Result<Self, NotACertificate> {
        let (rest, parsed) =
            X509Certificate::from_der(der).map_err(|_| NotACertificate("it is not in DER form"))?;
        if !rest.is_empty() {
            return Err(NotACertificate("something follows it"));
        }
        let mut names = parsed.subject().iter_common_name();
        let common_name = names
            .next()
            .and_then(|name| name.as_str().ok())
            .ok_or(NotACertificate("it has no common name"))?;
        if names.next().is_some() {
            return Err(NotACertificate("it has several common names"));
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
