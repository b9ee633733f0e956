//! What a cell is told before it can call home.

use std::{
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// The most that a cell's file may hold, in bytes. A longer one is not read.
const FILE_LIMIT: u64 = 1024 * 1024;

/// The byte on its standard input that lets a launcher begin: the provider has recorded it by then.
pub const GO: &[u8; 1] = b"\n";

/// Where the gateway listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GatewayAddress {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port.
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

/// What a cell is told before it can call home. Holds a secret: its `Debug` leaves it out.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bootstrap {
    /// The id of the cell that it is.
    pub cell: String,
    /// Where to call.
    pub gateway: GatewayAddress,
    /// SHA-256 of the DER form of the certificate authority's certificate, in hexadecimal: what the
    /// gateway's certificate must come from.
    pub ca_sha256: String,
    /// What the cell trades for its certificate, once. Secret.
    pub token: String,
    /// How long the cell goes on without contact to its gateway, in seconds, before it stops its
    /// pod and powers off.
    pub orphan_timeout_secs: u64,
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

/// The file that a provider gives a cell: how to call home, and how to run its containerd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellFile {
    /// How to call home.
    pub bootstrap: Bootstrap,
    /// The program `containerd`: a path, or a name to look up in `PATH`.
    pub containerd: PathBuf,
    /// The program `runc`: a path, or a name to look up in `PATH`.
    pub runc: PathBuf,
    /// The image of pod sandboxes.
    pub pause_image: String,
    /// A directory of `hosts.toml` files (containerd's `registry.config_path`); none: containerd's
    /// defaults.
    #[serde(default)]
    pub registry_config_dir: Option<PathBuf>,
    /// containerd's `restrict_oom_score_adj`: needed where the cell may not lower its score.
    #[serde(default)]
    pub restrict_oom_score_adj: bool,
}

/// Why a cell's file could not be read or written. Never quotes its content.
#[derive(Debug, thiserror::Error)]
pub enum CellFileError {
    /// The file system did not do it.
    #[error("the cell's file {0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// It is no such file.
    #[error("the cell's file {path:?} is not what it must be: line {line}, column {column}")]
    Form {
        /// The file.
        path: PathBuf,
        /// Where.
        line: usize,
        /// Where.
        column: usize,
    },
    /// It is longer than any such file.
    #[error("the cell's file {0:?} is longer than {FILE_LIMIT} bytes")]
    TooLong(PathBuf),
}

impl CellFile {
    /// Reads it.
    pub fn read(path: &Path) -> Result<Self, CellFileError> {
        let io = |source| CellFileError::Io(path.to_owned(), source);
        if std::fs::metadata(path).map_err(io)?.len() > FILE_LIMIT {
            return Err(CellFileError::TooLong(path.to_owned()));
        }
        Self::parse(path, &std::fs::read(path).map_err(io)?)
    }

    /// What the content of a file says. `path` is for words only.
    pub fn parse(path: &Path, content: &[u8]) -> Result<Self, CellFileError> {
        // serde's own words may quote the content, and so the token.
        serde_json::from_slice(content).map_err(|error| CellFileError::Form {
            path: path.to_owned(),
            line: error.line(),
            column: error.column(),
        })
    }

    /// Writes it, readable by its owner only; whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), CellFileError> {
        let content = serde_json::to_vec_pretty(self)
            .map_err(|error| CellFileError::Io(path.to_owned(), error.into()))?;
        crate::private::write(path, &content)
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
            },
            containerd: "containerd".into(),
            runc: "/usr/sbin/runc".into(),
            pause_image: "registry.k8s.io/pause:3.9".to_owned(),
            registry_config_dir: None,
            restrict_oom_score_adj: true,
        }
    }

    #[test]
    fn comes_back_as_it_was_and_is_private() {
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
    fn secrets_are_not_shown() {
        assert!(!format!("{:?}", file()).contains("sesame"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cell.json");
        std::fs::write(&path, "\"open-sesame\"").unwrap();
        let error = CellFile::read(&path).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("sesame"));
    }
}
