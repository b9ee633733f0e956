//! Backends that are container runtimes: calls are forwarded to their CRI sockets byte for byte.

use std::{path::PathBuf, time::Duration};

use super::{Backend, BackendName, CallPath, Declared};

mod connect;
mod unary;
mod upstream;

pub use unary::{UnaryError, UnaryResponse};
pub use upstream::{Unavailable, Upstream, UpstreamCall};

/// Largest message in bytes, without its gRPC frame header. Kubelet and containerd have the same
/// limit (cri-client utils.go, containerd defaults.go).
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// A container runtime on the node.
#[derive(Debug)]
pub struct CriBackend {
    name: BackendName,
    upstream: Upstream,
}

impl CriBackend {
    /// Creates a backend for a CRI socket. The first call connects to it.
    pub fn new(name: BackendName, socket: PathBuf, connect_timeout: Duration) -> Self {
        Self { name, upstream: Upstream::new(socket, connect_timeout) }
    }
}

impl Backend for CriBackend {
    fn name(&self) -> &BackendName {
        &self.name
    }

    fn declares(&self) -> Declared {
        Declared::default()
    }

    fn path(&self) -> CallPath<'_> {
        CallPath::Raw(&self.upstream)
    }
}
