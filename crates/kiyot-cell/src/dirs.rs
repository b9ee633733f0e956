//! Paths in a cell's directory.

use std::path::{Path, PathBuf};

/// Directory of containerd's content store below its root.
pub const CONTAINERD_CONTENT: &str = "io.containerd.content.v1.content";
/// Directory of the logs below [`CellDir::pod`].
pub const LOG_DIR: &str = "logs";

/// Directory of a cell: absolute, free of symbolic links, accessible to its owner only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellDir(PathBuf);

/// Errors of opening a cell's directory.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The path can't be resolved.
    #[error("cell directory {0:?}")]
    Io(PathBuf, #[source] std::io::Error),
    /// The cell mounts a file system of its own over the path.
    #[error(
        "cell directory {0:?}: not allowed below /run, /proc, /sys or /dev, \
         which a cell mounts for itself; use another state directory"
    )]
    Hidden(PathBuf),
}

impl CellDir {
    /// Opens an existing directory.
    pub fn open(path: &Path) -> Result<Self, DirError> {
        let real = path.canonicalize().map_err(|source| DirError::Io(path.to_owned(), source))?;
        if ["/run", "/proc", "/sys", "/dev"].iter().any(|hidden| real.starts_with(hidden)) {
            return Err(DirError::Hidden(real));
        }
        Ok(Self(real))
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the provider's settings, a [`kiyot_link::bootstrap::CellFile`].
    pub fn cell_file(&self) -> PathBuf {
        self.0.join("cell.json")
    }

    /// Returns the path of the boot data that a script on a stock image writes, a
    /// [`kiyot_link::bootstrap::CellFile`].
    pub fn boot_data(&self) -> PathBuf {
        self.0.join("boot-data.json")
    }

    /// Returns the path of the record of the machine's only boot as a cell.
    pub fn boot_record(&self) -> PathBuf {
        self.0.join("booted")
    }

    /// Returns the path of the description of a virtual machine, a
    /// [`kiyot_link::vm_file::VmFile`].
    pub fn vm_file(&self) -> PathBuf {
        self.0.join("vm.json")
    }

    /// Returns the path of a virtual machine's disk.
    pub fn vm_disk(&self) -> PathBuf {
        self.0.join("disk.img")
    }

    /// Returns the directory of the socket on which QEMU takes commands.
    pub fn qmp(&self) -> PathBuf {
        self.0.join("qmp")
    }

    /// Returns the path of the log of init and agent.
    pub fn console_log(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// Returns the path of containerd's log.
    pub fn containerd_log(&self) -> PathBuf {
        self.0.join("containerd.log")
    }

    /// Returns the mount point of the cell's own tmpfs. Empty in the host's mount namespace.
    pub fn private(&self) -> PathBuf {
        self.0.join("private")
    }

    /// Returns the path of containerd's configuration, which init writes.
    pub fn containerd_toml(&self) -> PathBuf {
        self.private().join("containerd.toml")
    }

    /// Returns the path of containerd's base spec, which init writes if the settings have limits.
    pub fn base_spec(&self) -> PathBuf {
        self.private().join("base-spec.json")
    }

    /// Returns containerd's `root`, with directories of [`CellDir::containerd_disk`].
    pub fn containerd_root(&self) -> PathBuf {
        self.private().join("containerd")
    }

    /// Returns the directory of containerd's files on the disk.
    pub fn containerd_disk(&self) -> PathBuf {
        self.0.join("containerd")
    }

    /// Returns the directory of containerd's content store.
    pub fn containerd_content(&self) -> PathBuf {
        self.containerd_root().join(CONTAINERD_CONTENT)
    }

    /// Returns the mount point at which the cell's root is assembled. Empty in the host's mount
    /// namespace.
    pub fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    /// Returns the path of containerd's `opt` plugin.
    pub fn containerd_opt(&self) -> PathBuf {
        self.private().join("opt")
    }

    /// Returns an empty directory for containerd's CNI settings: pods use the cell's network.
    pub fn no_cni(&self) -> PathBuf {
        self.private().join("no-cni")
    }

    /// Returns `pod_dir`, with the pod's volumes and logs.
    pub fn pod(&self) -> PathBuf {
        self.0.join("pod")
    }

    /// Returns `memory_dir`, a tmpfs.
    pub fn memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    /// Returns the directory of the agent's key and certificate.
    pub fn agent(&self) -> PathBuf {
        self.private().join("agent")
    }

    /// Returns the file in which `launch` records the host's namespaces.
    pub fn host_namespaces(&self) -> PathBuf {
        self.0.join("host-ns.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_below_a_replaced_mount_is_rejected() {
        assert!(matches!(CellDir::open(Path::new("/proc/self")), Err(DirError::Hidden(_))));
        assert!(matches!(CellDir::open(Path::new("/nowhere/at/all")), Err(DirError::Io(..))));
        let dir = tempfile::tempdir().unwrap();
        assert!(CellDir::open(dir.path()).is_ok());
    }
}
