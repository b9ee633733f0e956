//! Namespaces of the host and of the cell: a pod may change only namespaces that differ.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use serde::{Deserialize, Serialize};

/// File of the link's network namespace, on a machine that has one.
pub(crate) const LINK_NAMESPACE: &str = "/run/kiyot/link-ns";

/// Inode numbers of namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// Inode of the UTS namespace, which has the host name.
    pub uts: u64,
    /// Inode of the network namespace.
    pub net: u64,
}

impl Namespaces {
    /// Returns the namespaces of the calling thread.
    pub fn current() -> io::Result<Self> {
        let inode = |name: &str| {
            fs::metadata(format!("/proc/self/ns/{name}")).map(|metadata| metadata.ino())
        };
        Ok(Self { uts: inode("uts")?, net: inode("net")? })
    }

    /// Reads a file that [`Self::write`] wrote.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Writes the inode numbers to a file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        fs::write(path, serde_json::to_vec(self)?)
    }
}

/// Namespaces that a cell doesn't share with the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnNamespaces {
    /// The cell has a UTS namespace of its own.
    pub uts: bool,
    /// The cell has a network namespace of its own.
    pub net: bool,
}

impl OwnNamespaces {
    /// Compares the namespaces. If the host's are unknown, all count as shared.
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
    fn namespace_is_own_only_if_known_to_differ() {
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
    fn namespaces_survive_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns.json");
        let current = Namespaces::current().unwrap();
        current.write(&path).unwrap();
        assert_eq!(Namespaces::read(&path).unwrap(), current);
    }
}
