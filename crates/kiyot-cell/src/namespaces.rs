//! Which namespaces are the host's: what is the cell's own may be changed, the rest may not.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use serde::{Deserialize, Serialize};

/// Inode numbers that name namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// The UTS namespace: host name.
    pub uts: u64,
    /// The network namespace.
    pub net: u64,
}

impl Namespaces {
    /// Those of the calling thread.
    pub fn current() -> io::Result<Self> {
        let inode = |name: &str| {
            fs::metadata(format!("/proc/self/ns/{name}")).map(|metadata| metadata.ino())
        };
        Ok(Self { uts: inode("uts")?, net: inode("net")? })
    }

    /// Reads what [`Self::write`] wrote.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Writes them to a file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        fs::write(path, serde_json::to_vec(self)?)
    }
}

/// Which of its namespaces a cell has for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnNamespaces {
    /// Has a host name of its own.
    pub uts: bool,
    /// Has a network of its own.
    pub net: bool,
}

impl OwnNamespaces {
    /// Compares. When the host's are not known, nothing is the cell's own.
    pub fn compare(host: Option<Namespaces>, current: Namespaces) -> Self {
        Self {
            uts: host.is_some_and(|host| host.uts != current.uts),
            net: host.is_some_and(|host| host.net != current.net),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_certainly_differs_is_own() {
        let host = Namespaces { uts: 1, net: 2 };
        assert_eq!(
            OwnNamespaces::compare(Some(host), host),
            OwnNamespaces { uts: false, net: false }
        );
        assert_eq!(
            OwnNamespaces::compare(Some(host), Namespaces { uts: 1, net: 3 }),
            OwnNamespaces { uts: false, net: true }
        );
        assert_eq!(OwnNamespaces::compare(None, host), OwnNamespaces { uts: false, net: false });
    }

    #[test]
    fn they_are_kept_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns.json");
        let current = Namespaces::current().unwrap();
        current.write(&path).unwrap();
        assert_eq!(Namespaces::read(&path).unwrap(), current);
    }
}
