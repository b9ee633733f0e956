//! The file by which a provider describes a virtual machine to its launcher.

use std::{
    fmt, io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// The most bytes of a file. A longer one is not read.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The tap device of the pod's network.
pub const POD_TAP: &str = "tap-pod";
/// The tap device of the link to the daemon.
pub const LINK_TAP: &str = "tap-link";
/// The launcher's address on the link. Link-local addresses are no pod's and no service's.
pub const LINK_HOST: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 1);
/// The virtual machine's address on the link.
pub const LINK_GUEST: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 2);
/// The length of the link's prefix, in bits.
pub const LINK_PREFIX: u8 = 30;
/// The port on which the launcher relays connections to the gateway.
pub const LINK_PORT: u16 = 7700;

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFile {
    /// The program QEMU: an absolute path.
    pub program: PathBuf,
    /// The accelerator.
    pub accelerator: Accelerator,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs; without one the kernel panics once it is up.
    pub initramfs: Option<PathBuf>,
    /// The file system of the root, which is read-only; `None` for a machine without disks.
    pub root: Option<PathBuf>,
    /// The size of the machine's own disk in bytes; `None` for a machine without one.
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
    /// The network; `None` for a machine without one.
    pub network: Option<VmNetwork>,
}

/// The network devices of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    /// The address of the device for the pod, until it takes that of the pod.
    pub pod_mac: MacAddress,
    /// The address of the link's device.
    pub link_mac: MacAddress,
    /// The gateway's unix socket, to which connections over the link are relayed.
    pub gateway: PathBuf,
}

/// The accelerator of a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The processor's virtualisation.
    Kvm,
    /// Translation, which runs everywhere, and slowly.
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

/// An address of an Ethernet device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

/// A text that is not the address of an Ethernet device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a MAC address; allowed: six bytes in hexadecimal with colons between them")]
pub struct NotAMacAddress(String);

impl MacAddress {
    /// Returns a locally administered unicast address with these five bytes.
    pub fn local(rest: [u8; 5]) -> Self {
        let [a, b, c, d, e] = rest;
        Self([2, a, b, c, d, e])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.0;
        write!(f, "{first:02x}")?;
        rest.iter().try_for_each(|byte| write!(f, ":{byte:02x}"))
    }
}

impl FromStr for MacAddress {
    type Err = NotAMacAddress;

    fn from_str(text: &str) -> Result<Self, NotAMacAddress> {
        let byte = |part: &str| {
            let plain = part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u8::from_str_radix(part, 16).ok()).flatten()
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(|| NotAMacAddress(text.chars().take(32).collect()))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = NotAMacAddress;

    fn try_from(text: String) -> Result<Self, NotAMacAddress> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> Self {
        address.to_string()
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
    /// The file is longer than any.
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
                pod_mac: MacAddress::local([1, 2, 3, 4, 5]),
                link_mac: MacAddress([0xfe, 0, 0, 0, 0, 0xff]),
                gateway: "/var/lib/kiyot/gateway.sock".into(),
            }),
        };
        file.write(&path).unwrap();
        assert_eq!(VmFile::read(&path).unwrap(), file);
        std::fs::write(&path, "{}").unwrap();
        assert!(VmFile::read(&path).is_err());
    }

    #[test]
    fn mac_address_is_six_bytes() {
        assert_eq!("02:aB:00:01:02:ff".parse(), Ok(MacAddress([2, 0xab, 0, 1, 2, 0xff])));
        assert_eq!(MacAddress::local([0xab, 0, 1, 2, 0xff]).to_string(), "02:ab:00:01:02:ff");
        for text in
            ["", "02:ab:00:01:02", "02:ab:00:01:02:ff:00", "2:ab:00:01:02:ff", "+2:ab:0:1:2:f"]
        {
            assert!(text.parse::<MacAddress>().is_err(), "{text:?}");
        }
    }
}
