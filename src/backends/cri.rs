//! The raw upstream: a container runtime's CRI socket.

/// A container runtime's CRI socket, to which calls are forwarded as they came.
#[derive(Debug)]
pub struct Upstream {}
