//! The file that describes a virtual machine to its launcher.

use std::{
    fmt, io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::mac_address::MacAddress;

/// The most bytes of a file. A longer file is not read.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The tap device of the pod's network.
pub const POD_TAP: &str = "tap-pod";
/// The tap device of the link to the daemon.
pub const LINK_TAP: &str = "tap-link";
/// The launcher's address on the link. Link-local addresses belong to no pod and no service.
pub const LINK_HOST: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 1);
/// The virtual machine's address on the link.
pub const LINK_GUEST: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 2);
/// The length of the link's prefix, in bits.
pub const LINK_PREFIX: u8 = 30;
/// The port on which the launcher relays connections to the gateway.
pub const LINK_PORT: u16 = 7700;

/// The size of QEMU's cache of translated code in MiB, beside the guest's memory. By default it may
/// grow to a GiB.
pub const TCG_CACHE_MIB: u64 = 128;

/// The exit status of a probe (`kiyot-cell probe-vm`) if no kernel prints under its accelerator.
pub const NOT_USABLE: i32 = 3;

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFile {
    /// The program QEMU: an absolute path.
    pub program: PathBuf,
    /// The accelerator.
    pub accelerator: Accelerator,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs; without it the kernel panics at the end of its boot.
    pub initramfs: Option<PathBuf>,
    /// The root file system, read-only; `None` for a machine without disks.
    pub root: Option<PathBuf>,
    /// The size of the machine's own disk in bytes; `None` for a machine without its own disk.
    pub disk_bytes: Option<u64>,
    /// The kernel's command line.
    pub command_line: String,
    /// The vCPUs.
    pub cpus: u32,
    /// The memory in MiB.
    pub memory_mib: u64,
    /// The user of the QEMU process, not root.
    pub user: u32,
    /// The group of the QEMU process, not root.
    pub group: u32,
    /// The network devices; `None` for a machine without a network.
    pub network: Option<VmNetwork>,
}

/// The network devices of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    /// The hardware address of the pod's device until the device takes the pod's address.
    pub pod_mac: MacAddress,
    /// The hardware address of the link's device.
    pub link_mac: MacAddress,
    /// The gateway's unix socket, to which the launcher relays connections over the link.
    pub gateway: PathBuf,
}

/// The accelerator of a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The processor's virtualisation.
    Kvm,
    /// Translation: runs everywhere, but slowly.
    Tcg,
}

impl Accelerator {
    /// Returns QEMU's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An error of reading or writing the file of a virtual machine.
#[derive(Debug, thiserror::Error)]
pub enum VmFileError {
    /// The file could not be read or written.
    #[error("{0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// The file is not valid JSON, or lacks a field.
    #[error("{0:?} describes no virtual machine")]
    Invalid(PathBuf, #[source] serde_json::Error),
    /// The file exceeds the limit.
    #[error("{0:?} is longer than {MAX_FILE_BYTES} bytes")]
    TooLong(PathBuf),
}

impl VmFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, VmFileError> {
        let io = |source| VmFileError::Io(path.to_owned(), source);
        if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE_BYTES {
            return Err(VmFileError::TooLong(path.to_owned()));
        }
        serde_json::from_slice(&std::fs::read(path).map_err(io)?)
            .map_err(|source| VmFileError::Invalid(path.to_owned(), source))
    }

    /// Writes a file atomically, readable by its owner only.
    pub fn write(&self, path: &Path) -> Result<(), VmFileError> {
        let content = serde_json::to_vec_pretty(self)
            .map_err(|source| VmFileError::Invalid(path.to_owned(), source))?;
        crate::private_file::write(path, &content)
            .map_err(|source| VmFileError::Io(path.to_owned(), source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_written_and_read_is_equal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.json");
        let file = VmFile {
            program: "/usr/bin/qemu-system-x86_64".into(),
            accelerator: Accelerator::Tcg,
            kernel: "/image/kernel".into(),
            initramfs: None,
            root: Some("/image/root.squashfs".into()),
            disk_bytes: Some(10 << 30),
            command_line: "panic=-1 -- machine".into(),
            cpus: 2,
            memory_mib: 704,
            user: 65521,
            group: 65521,
            network: Some(VmNetwork {
                pod_mac: MacAddress([2, 0, 0x5e, 0, 0x53, 1]),
                link_mac: MacAddress([2, 0, 0x5e, 0, 0x53, 2]),
                gateway: "/var/lib/kiyot/gateway.sock".into(),
            }),
        };
        file.write(&path).unwrap();
        assert_eq!(VmFile::read(&path).unwrap(), file);
        std::fs::write(&path, "{}").unwrap();
        assert!(VmFile::read(&path).is_err());
    }
}
