//! The raw upstream: a container runtime's CRI socket, to which calls are forwarded as they came.

use std::{path::PathBuf, time::Duration};

use super::{Backend, BackendName, CallPath, Declared};

mod connect;
mod exchange;
mod frames;
#[doc(hidden)]
pub mod http2;
mod pong;
mod socket;
mod upstream;
mod wire;

pub use exchange::{Answer, Failure};
pub use http2::{Answering, Error, Receiving, Sending};
pub use upstream::{Sent, Unavailable, Upstream};
pub use wire::{Tap, Wire};

/// The largest message, as kubelet and containerd have it (cri-client utils.go, containerd defaults.go). Bytes, without the gRPC frame's head.
pub const MAX_MESSAGE: usize = 16 << 20;

/// What one stream may have under way to us before its receiver took it. Bytes. Large enough for most answers, so that window updates are rare.
pub const STREAM_WINDOW: u32 = 1 << 20;

/// The same of all streams of a connection: more than a thousand streams that nobody reads, which then hold up no other.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// How many reset streams a connection remembers, and for how long: callers may cancel all their calls at once, and answers to those are under way.
pub const RESET_STREAMS: usize = 16_384;
/// See [`RESET_STREAMS`].
pub const RESET_STREAM_DURATION: Duration = Duration::from_secs(10);

/// Metadata of one request or answer at most, in bytes as HTTP/2 counts them. grpc-go allows 16 MiB; status details are what is long there.
pub const MAX_HEADER_LIST: u32 = 1 << 20;

/// A backend that is a container runtime on the node.
#[derive(Debug)]
pub struct Cri {
    name: BackendName,
    upstream: Upstream,
}

impl Cri {
    /// Of a CRI socket. Nothing is connected before the first call.
    pub fn new(name: BackendName, socket: PathBuf, connect_timeout: Duration) -> Self {
        Self { name, upstream: Upstream::new(socket, connect_timeout) }
    }
}

impl Backend for Cri {
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
