//! Boot data of a cell: its identity, its gateway, and the programs that it runs.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{cri_settings::CriSettings, mac_address::MacAddress};

/// The most bytes of a cell file. A longer file is not read.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The byte on a launcher's standard input that starts it. The provider sends it after it has
/// recorded the launcher's process.
pub const GO: &[u8; 1] = b"\n";

/// The address of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GatewayAddress {
    /// A path of a unix socket.
    Unix(PathBuf),
    /// An IP address and a TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// The data that a cell needs to enrol. Holds a secret, which `Debug` omits.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bootstrap {
    /// The cell's id.
    pub cell: String,
    /// The gateway to dial.
    pub gateway: GatewayAddress,
    /// SHA-256 of the certificate authority's certificate (DER), in hexadecimal. The gateway's
    /// certificate must be issued by this authority.
    pub ca_sha256: String,
    /// The one-time token that the cell exchanges for its certificate. Secret.
    pub token: String,
    /// The time without contact to the gateway after which the cell stops its pod and powers off,
    /// in seconds.
    pub orphan_timeout_secs: u64,
    /// The agent's program, for a cell on another machine; `None` if the gateway serves none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentPin>,
}

/// The agent's program. The gateway serves it at `https://gateway.kiyot.internal:PORT/agent`; the
/// user is the cell's id, and the password its token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentPin {
    /// SHA-256 in hexadecimal.
    pub sha256: String,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The certificate of the authority in PEM form, for a client that can't pin its digest.
    pub ca_pem: String,
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap")
            .field("cell", &self.cell)
            .field("gateway", &self.gateway)
            .field("ca_sha256", &self.ca_sha256)
            .field("orphan_timeout_secs", &self.orphan_timeout_secs)
            .finish_non_exhaustive()
    }
}

/// The file that a provider gives a cell: its bootstrap data, and how to run its containerd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellFile {
    /// The data for enrolment.
    pub bootstrap: Bootstrap,
    /// The executable `containerd`: a path, or a name to look up in `PATH`.
    pub containerd: PathBuf,
    /// The executable `runc`: a path, or a name to look up in `PATH`.
    pub runc: PathBuf,
    /// The image of pod sandboxes.
    pub pause_image: String,
    /// A directory of `hosts.toml` files (containerd's `registry.config_path`); `None` leaves
    /// containerd's defaults.
    #[serde(default)]
    pub registry_config_dir: Option<PathBuf>,
    /// containerd's `restrict_oom_score_adj`: needed where the cell may not lower its OOM score.
    #[serde(default)]
    pub restrict_oom_score_adj: bool,
    /// Settings of the node's CRI plugin that apply in the cell too.
    #[serde(default, skip_serializing_if = "CriSettings::is_default")]
    pub cri: CriSettings,
    /// The cell's own machine; `None` for a cell in namespaces of the node.
    #[serde(default)]
    pub machine: Option<Machine>,
}

/// A machine of the cell's own, with a single kernel. It ends when its init does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The hardware address of the device that the pod gets; `None` if the machine has a single
    /// device.
    #[serde(default)]
    pub pod_mac: Option<MacAddress>,
    /// The link's own device, which the pod doesn't see; `None` if the link has no device of its
    /// own.
    #[serde(default)]
    pub link: Option<LinkDevice>,
    /// The most seconds from the start of init or service to enrolment. After that time the machine
    /// powers off.
    pub power_off_after_secs: u64,
    /// Addresses that the pod must not reach, such as the cloud's metadata service.
    #[serde(default)]
    pub closed_addresses: Vec<IpAddr>,
    /// Networks that the cell reaches through the node, at the gateway's address: address and
    /// prefix length.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_networks: Vec<(IpAddr, u8)>,
}

/// The network device of the link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkDevice {
    /// The hardware address, which identifies the device.
    pub mac: MacAddress,
    /// The IP address.
    pub address: IpAddr,
    /// The prefix length of its network, in bits.
    pub prefix_len: u8,
}

/// An error of reading or writing a cell file. Never quotes the content.
#[derive(Debug, thiserror::Error)]
pub enum CellFileError {
    /// The file could not be read or written.
    #[error("cell file {0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// The file is not valid JSON, or lacks a field.
    #[error("cell file {path:?}: invalid content at line {line}, column {column}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line of the first error, from 1.
        line: usize,
        /// The column of the first error, from 1.
        column: usize,
    },
    /// The file exceeds the limit.
    #[error("cell file {0:?} is longer than {MAX_FILE_BYTES} bytes")]
    TooLong(PathBuf),
}

impl CellFile {
    /// Reads a cell file.
    pub fn read(path: &Path) -> Result<Self, CellFileError> {
        let io = |source| CellFileError::Io(path.to_owned(), source);
        if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE_BYTES {
            return Err(CellFileError::TooLong(path.to_owned()));
        }
        Self::parse(path, &std::fs::read(path).map_err(io)?)
    }

    /// Parses the content of a cell file. `path` is for error messages only.
    pub fn parse(path: &Path, content: &[u8]) -> Result<Self, CellFileError> {
        // serde's messages may quote the content, and so the token.
        serde_json::from_slice(content).map_err(|error| CellFileError::Invalid {
            path: path.to_owned(),
            line: error.line(),
            column: error.column(),
        })
    }

    /// Writes the file atomically, readable by its owner only.
    pub fn write(&self, path: &Path) -> Result<(), CellFileError> {
        let content = serde_json::to_vec_pretty(self)
            .map_err(|error| CellFileError::Io(path.to_owned(), error.into()))?;
        crate::private_file::write(path, &content)
            .map_err(|source| CellFileError::Io(path.to_owned(), source))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> CellFile {
        CellFile {
            bootstrap: Bootstrap {
                cell: "cell-aaaaaaaaaaaa".to_owned(),
                gateway: GatewayAddress::Unix("/var/lib/kiyot/gateway.sock".into()),
                ca_sha256: "00".repeat(32),
                token: "open-sesame".to_owned(),
                orphan_timeout_secs: 900,
                agent: None,
            },
            containerd: "containerd".into(),
            runc: "/usr/sbin/runc".into(),
            pause_image: "registry.k8s.io/pause:3.9".to_owned(),
            registry_config_dir: None,
            restrict_oom_score_adj: true,
            cri: CriSettings::default(),
            machine: None,
        }
    }

    #[test]
    fn cell_file_written_and_read_is_equal_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cell.json");
        for _ in 0..2 {
            file().write(&path).unwrap();
            assert_eq!(CellFile::read(&path).unwrap(), file());
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn cell_file_of_an_earlier_version_has_the_default_settings() {
        let content = serde_json::to_vec(&file()).unwrap();
        assert!(!String::from_utf8_lossy(&content).contains("\"cri\""));
        assert_eq!(CellFile::parse(Path::new("cell.json"), &content).unwrap(), file());
    }

    #[test]
    fn debug_and_errors_omit_the_token() {
        assert!(!format!("{:?}", file()).contains("sesame"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cell.json");
        std::fs::write(&path, "\"open-sesame\"").unwrap();
        let error = CellFile::read(&path).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("sesame"));
    }
}
