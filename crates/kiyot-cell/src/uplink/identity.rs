//! Private key of the agent, which never leaves the cell, and its certificate.

use std::{
    fmt, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use kiyot_link::{
    certificate::{Certificate, sha256},
    private_file,
    tls::Identity,
};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

const KEY_FILE: &str = "key.der";
/// File of the certificate, in the agent's directory.
pub(crate) const CERTIFICATE_FILE: &str = "certificate.der";

/// Errors of creating or storing the key and the certificate.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file can't be read or written.
    #[error("{0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// The key or the signing request can't be created.
    #[error("create the key or the certificate signing request")]
    Make(#[source] rcgen::Error),
}

/// Key pair and certificate. `Debug` omits the key.
pub(super) struct Credentials {
    dir: PathBuf,
    cell: String,
    key: KeyPair,
    certificate: Mutex<Option<IssuedCertificate>>,
}

struct IssuedCertificate {
    der: Vec<u8>,
    not_after: SystemTime,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Loads the key and certificate that an earlier run of the agent stored, or creates a key. An
    /// unreadable key is replaced, which makes the stored certificate useless.
    pub(super) fn load_or_create(dir: &Path, cell: &str) -> Result<Self, IdentityError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |error| IdentityError::Io(path, error)
        };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io(dir))?;
        let path = dir.join(KEY_FILE);
        let key = match read(&path).map_err(io(&path))?.and_then(|der| parse(&der)) {
            Some(key) => key,
            None => {
                let key =
                    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(IdentityError::Make)?;
                private_file::write(&path, &key.serialize_der()).map_err(io(&path))?;
                key
            }
        };
        let credentials =
            Self { dir: dir.to_owned(), cell: cell.to_owned(), key, certificate: Mutex::new(None) };
        let path = dir.join(CERTIFICATE_FILE);
        if let Some(der) = read(&path).map_err(io(&path))? {
            credentials.adopt(&der);
        }
        Ok(credentials)
    }

    /// Returns a certificate signing request. The gateway uses only its key.
    pub(super) fn csr(&self) -> Result<Vec<u8>, IdentityError> {
        Ok(CertificateParams::default()
            .serialize_request(&self.key)
            .map_err(IdentityError::Make)?
            .der()
            .to_vec())
    }

    /// Stores a certificate if it is for this cell and key, and returns whether it is.
    pub(super) fn store(&self, der: &[u8]) -> Result<bool, IdentityError> {
        let matches = self.adopt(der);
        if matches {
            let path = self.dir.join(CERTIFICATE_FILE);
            private_file::write(&path, der).map_err(|error| IdentityError::Io(path, error))?;
        }
        Ok(matches)
    }

    /// Returns whether the agent has a certificate that is valid at `now`. The gateway decides by
    /// its own clock, which may differ.
    pub(super) fn has_valid_certificate(&self, now: SystemTime) -> bool {
        self.certificate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|certified| certified.not_after > now)
    }

    /// Returns whether the agent has a certificate, even if expired: the token has then been
    /// redeemed for this key.
    pub(super) fn has_certificate(&self) -> bool {
        self.certificate.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Returns the TLS identity, or `None` without a certificate.
    pub(super) fn identity(&self) -> Option<Identity> {
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        certificate
            .as_ref()
            .map(|certified| Identity::new(vec![certified.der.clone()], self.key.serialize_der()))
    }

    fn adopt(&self, der: &[u8]) -> bool {
        let Ok(read) = Certificate::read(der) else { return false };
        if read.common_name != self.cell
            || read.key_sha256 != sha256(&self.key.subject_public_key_info())
        {
            return false;
        }
        *self.certificate.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(IssuedCertificate { der: der.to_vec(), not_after: read.not_after });
        true
    }
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(der: &[u8]) -> Option<KeyPair> {
    KeyPair::from_der_and_sign_algo(
        &PrivateKeyDer::from(PrivatePkcs8KeyDer::from(der.to_vec())),
        &PKCS_ECDSA_P256_SHA256,
    )
    .ok()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, time::Duration};

    use rcgen::DnType;

    use super::*;

    fn certificate(credentials: &Credentials, cell: &str, not_after: SystemTime) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, cell);
        params.not_before = SystemTime::UNIX_EPOCH.into();
        params.not_after = not_after.into();
        params.self_signed(&credentials.key).unwrap().der().to_vec()
    }

    #[test]
    fn restarted_agent_loads_its_key_and_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("private");
        let credentials = Credentials::load_or_create(&dir, "cell-a").unwrap();
        assert!(credentials.identity().is_none());
        let later = SystemTime::now() + Duration::from_secs(3600);
        credentials.store(&certificate(&credentials, "cell-b", later)).unwrap();
        assert!(
            !credentials.has_valid_certificate(SystemTime::now()),
            "another cell's certificate"
        );
        credentials.store(&certificate(&credentials, "cell-a", later)).unwrap();
        assert!(credentials.has_valid_certificate(SystemTime::now()));

        let reloaded = Credentials::load_or_create(&dir, "cell-a").unwrap();
        assert!(reloaded.has_valid_certificate(SystemTime::now()) && reloaded.identity().is_some());
        assert_eq!(reloaded.key.serialize_der(), credentials.key.serialize_der());
        assert!(
            !Credentials::load_or_create(&dir, "cell-b")
                .unwrap()
                .has_valid_certificate(SystemTime::now())
        );
        for file in [KEY_FILE, CERTIFICATE_FILE] {
            assert_eq!(
                std::fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn expired_certificate_stays_usable_and_a_corrupt_key_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let credentials = Credentials::load_or_create(dir.path(), "cell-a").unwrap();
        credentials
            .store(&certificate(&credentials, "cell-a", SystemTime::now() - Duration::from_secs(1)))
            .unwrap();
        assert!(
            !credentials.has_valid_certificate(SystemTime::now()) && credentials.has_certificate()
        );
        assert!(
            credentials.has_valid_certificate(SystemTime::now() - Duration::from_secs(60))
                && credentials.identity().is_some()
        );
        std::fs::write(dir.path().join(KEY_FILE), "half a k").unwrap();
        std::fs::write(dir.path().join(CERTIFICATE_FILE), "half a c").unwrap();
        assert!(Credentials::load_or_create(dir.path(), "cell-a").unwrap().identity().is_none());
    }
}
