//! The service account of a pod, in files like those that a kubelet projects.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// The directory of a pod's service account.
const DIRECTORY: &str = "/run/secrets/kubernetes.io/serviceaccount";
const FILES: [&str; 3] = ["token", "ca.crt", "namespace"];

/// A service account for this process, which acts as a pod. Dropping it removes its files.
#[derive(Debug)]
pub struct ServiceAccount {
    at: SocketAddr,
    authority: String,
    version: usize,
}

impl ServiceAccount {
    /// Returns a service account without files. Only for a process in its own namespaces: no other
    /// process may see its `/run`.
    pub(super) fn new(at: SocketAddr, authority: String) -> Self {
        assert!(std::env::var_os("OWN_NAMESPACES").is_some(), "/run is the host's");
        Self { at, authority, version: 0 }
    }

    /// Returns the environment variables of each container of a pod.
    pub fn environment(&self) -> Vec<(String, String)> {
        let variable = |name: &str, value: String| (name.to_owned(), value);
        vec![
            variable("KUBERNETES_SERVICE_HOST", self.at.ip().to_string()),
            variable("KUBERNETES_SERVICE_PORT", self.at.port().to_string()),
        ]
    }

    /// Writes the files with a new token, which replaces the previous token. All files change at
    /// once.
    pub fn project(&mut self, token: &str) {
        self.version += 1;
        let directory = Path::new(DIRECTORY);
        let name = format!("..version-{}", self.version);
        fs::create_dir_all(directory.join(&name)).unwrap();
        for (file, content) in FILES.into_iter().zip([token, &self.authority, "kiyot"]) {
            fs::write(directory.join(&name).join(file), content).unwrap();
        }
        let next = directory.join("..data_tmp");
        symlink(&name, &next).unwrap();
        fs::rename(&next, directory.join("..data")).unwrap();
        for file in FILES.into_iter().filter(|_| self.version == 1) {
            symlink(PathBuf::from("..data").join(file), directory.join(file)).unwrap();
        }
    }
}

impl Drop for ServiceAccount {
    fn drop(&mut self) {
        // The directory is absent if no token was projected.
        let _ = fs::remove_dir_all(DIRECTORY);
    }
}
