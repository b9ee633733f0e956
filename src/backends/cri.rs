//! Backends that are container runtimes: calls are forwarded to their CRI sockets byte for byte.

use std::{path::PathBuf, time::Duration};

use super::{Backend, BackendName, CallPath, Declared};

mod connect;
mod unary;
mod upstream;

pub use unary::{UnaryError, UnaryResponse};
pub use upstream::{Unavailable, Upstream, UpstreamCall};

/// Bound on the bytes of a message without its gRPC frame header. Kubelet and containerd have the
/// same (cri-client utils.go, containerd defaults.go).
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// A container runtime on the node.
#[derive(Debug)]
pub struct CriBackend {
    name: BackendName,
    upstream: Upstream,
}

impl CriBackend {
    /// Makes a backend of a CRI socket, which is connected at the first call.
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
