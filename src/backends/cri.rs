//! The raw upstream: a container runtime's CRI socket, to which calls are forwarded as they came.

use std::{path::PathBuf, time::Duration};

use super::{Backend, BackendName, CallPath, Declared};

mod connect;
mod unary;
mod upstream;

pub use unary::{UnaryError, UnaryResponse};
pub use upstream::{Unavailable, Upstream, UpstreamCall};

/// The largest message, as kubelet and containerd have it (cri-client utils.go, containerd
/// defaults.go). Bytes, without the gRPC frame's head.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// A backend that is a container runtime on the node.
#[derive(Debug)]
pub struct CriBackend {
    name: BackendName,
    upstream: Upstream,
}

impl CriBackend {
    /// Of a CRI socket. Nothing is connected before the first call.
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
