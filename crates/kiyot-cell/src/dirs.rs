//! Where things are in a cell's directory.

use std::path::{Path, PathBuf};

/// A cell's directory: absolute, without links in it, readable by its owner only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellDir(PathBuf);

/// Why a path cannot be a cell's directory.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// It cannot be looked at.
    #[error("the cell's directory {0:?}")]
    Io(PathBuf, #[source] std::io::Error),
    /// The cell mounts something of its own over it.
    #[error(
        "the cell's directory {0:?} is under /run, /proc, /sys or /dev, which a cell has for itself or for devices: use another state directory"
    )]
    Hidden(PathBuf),
}

impl CellDir {
    /// Opens one that exists.
    pub fn open(path: &Path) -> Result<Self, DirError> {
        let real = path.canonicalize().map_err(|source| DirError::Io(path.to_owned(), source))?;
        if ["/run", "/proc", "/sys", "/dev"].iter().any(|hidden| real.starts_with(hidden)) {
            return Err(DirError::Hidden(real));
        }
        Ok(Self(real))
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What the provider wrote: a [`kiyot_link::bootstrap::CellFile`].
    pub fn cell_file(&self) -> PathBuf {
        self.0.join("cell.json")
    }

    /// What init and agent print.
    pub fn console_log(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// What containerd prints.
    pub fn containerd_log(&self) -> PathBuf {
        self.0.join("containerd.log")
    }

    /// containerd's configuration, written by init.
    pub fn containerd_toml(&self) -> PathBuf {
        self.0.join("containerd.toml")
    }

    /// containerd's `root`.
    pub fn containerd_root(&self) -> PathBuf {
        self.0.join("containerd")
    }

    /// Where containerd's metadata is, beneath its `root`: a tmpfs of the cell's own. In it are the
    /// containers as they were asked for, with their environment variables.
    pub fn containerd_metadata(&self) -> PathBuf {
        self.containerd_root().join("io.containerd.metadata.v1.bolt")
    }

    /// Where the root of the cell's mount namespace is put together. Empty for the node.
    pub fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    /// containerd's `opt`.
    pub fn containerd_opt(&self) -> PathBuf {
        self.0.join("opt")
    }

    /// Empty directories for containerd's CNI settings: the pod uses the cell's network.
    pub fn no_cni(&self) -> PathBuf {
        self.0.join("no-cni")
    }

    /// `pod_dir`: the pod's volumes and logs.
    pub fn pod(&self) -> PathBuf {
        self.0.join("pod")
    }

    /// `memory_dir`: a tmpfs of the cell's own.
    pub fn memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    /// The agent's own: its key and certificate.
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent")
    }

    /// Which namespaces are the host's, recorded by `launch`.
    pub fn host_namespaces(&self) -> PathBuf {
        self.0.join("host-ns.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cell_hides_is_no_place_for_it() {
        assert!(matches!(CellDir::open(Path::new("/proc/self")), Err(DirError::Hidden(_))));
        assert!(matches!(CellDir::open(Path::new("/nowhere/at/all")), Err(DirError::Io(..))));
        let dir = tempfile::tempdir().unwrap();
        assert!(CellDir::open(dir.path()).is_ok());
    }
}
