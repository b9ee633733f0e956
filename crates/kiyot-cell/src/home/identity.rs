//! The agent's key, which never leaves the cell, and its certificate.

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
const CERTIFICATE_FILE: &str = "certificate.der";

/// Why there is no key, or why it is not kept.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file system did not do it.
    #[error("{0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// A key or a request could not be made.
    #[error("making a key or a request for a certificate")]
    Make(#[source] rcgen::Error),
}

/// Key and certificate. Its `Debug` leaves the key out.
pub(super) struct Keys {
    dir: PathBuf,
    cell: String,
    key: KeyPair,
    certificate: Mutex<Option<Certified>>,
}

struct Certified {
    der: Vec<u8>,
    not_after: SystemTime,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Keys {
    /// What an earlier run of the agent kept. A key that can't be read is replaced: the certificate
    /// of the one before is then worth nothing.
    pub(super) fn load_or_make(dir: &Path, cell: &str) -> Result<Self, IdentityError> {
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
        let keys =
            Self { dir: dir.to_owned(), cell: cell.to_owned(), key, certificate: Mutex::new(None) };
        let path = dir.join(CERTIFICATE_FILE);
        if let Some(der) = read(&path).map_err(io(&path))? {
            keys.take(&der);
        }
        Ok(keys)
    }

    /// A request for a certificate. Nobody looks at what else is in it but the key.
    pub(super) fn request(&self) -> Result<Vec<u8>, IdentityError> {
        Ok(CertificateParams::default()
            .serialize_request(&self.key)
            .map_err(IdentityError::Make)?
            .der()
            .to_vec())
    }

    /// Keeps a certificate, if it is for this cell and key: says whether it is.
    pub(super) fn keep(&self, der: &[u8]) -> Result<bool, IdentityError> {
        let taken = self.take(der);
        if taken {
            let path = self.dir.join(CERTIFICATE_FILE);
            private_file::write(&path, der).map_err(|error| IdentityError::Io(path, error))?;
        }
        Ok(taken)
    }

    /// Whether there is a certificate that has not ended at this time. The gateway's clock decides,
    /// and may be another.
    pub(super) fn is_certified(&self, now: SystemTime) -> bool {
        self.certificate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|certified| certified.not_after > now)
    }

    /// Whether there is a certificate, be it one that has ended: then the cell's token is spent,
    /// for this key.
    pub(super) fn was_certified(&self) -> bool {
        self.certificate.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// For TLS, unless there is no certificate.
    pub(super) fn identity(&self) -> Option<Identity> {
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        certificate
            .as_ref()
            .map(|certified| Identity::new(vec![certified.der.clone()], self.key.serialize_der()))
    }

    fn take(&self, der: &[u8]) -> bool {
        let Ok(read) = Certificate::read(der) else { return false };
        if read.common_name != self.cell
            || read.key_sha256 != sha256(&self.key.subject_public_key_info())
        {
            return false;
        }
        *self.certificate.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Certified { der: der.to_vec(), not_after: read.not_after });
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

    fn certificate(keys: &Keys, cell: &str, not_after: SystemTime) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, cell);
        params.not_before = SystemTime::UNIX_EPOCH.into();
        params.not_after = not_after.into();
        params.self_signed(&keys.key).unwrap().der().to_vec()
    }

    #[test]
    fn an_agent_that_is_started_again_has_its_key_and_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("private");
        let keys = Keys::load_or_make(&dir, "cell-a").unwrap();
        assert!(keys.identity().is_none());
        let later = SystemTime::now() + Duration::from_secs(3600);
        keys.keep(&certificate(&keys, "cell-b", later)).unwrap();
        assert!(!keys.is_certified(SystemTime::now()), "another cell's certificate");
        keys.keep(&certificate(&keys, "cell-a", later)).unwrap();
        assert!(keys.is_certified(SystemTime::now()));

        let again = Keys::load_or_make(&dir, "cell-a").unwrap();
        assert!(again.is_certified(SystemTime::now()) && again.identity().is_some());
        assert_eq!(again.key.serialize_der(), keys.key.serialize_der());
        assert!(!Keys::load_or_make(&dir, "cell-b").unwrap().is_certified(SystemTime::now()));
        for file in [KEY_FILE, CERTIFICATE_FILE] {
            assert_eq!(
                std::fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn what_is_broken_is_not_used_and_what_has_ended_only_if_the_gateway_takes_it() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::load_or_make(dir.path(), "cell-a").unwrap();
        keys.keep(&certificate(&keys, "cell-a", SystemTime::now() - Duration::from_secs(1)))
            .unwrap();
        assert!(!keys.is_certified(SystemTime::now()) && keys.was_certified());
        assert!(
            keys.is_certified(SystemTime::now() - Duration::from_secs(60))
                && keys.identity().is_some()
        );
        std::fs::write(dir.path().join(KEY_FILE), "half a k").unwrap();
        std::fs::write(dir.path().join(CERTIFICATE_FILE), "half a c").unwrap();
        assert!(Keys::load_or_make(dir.path(), "cell-a").unwrap().identity().is_none());
    }
}
