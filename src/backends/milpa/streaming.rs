//! Exec, attach and port-forward: one HTTP request head is read, its target swapped, and bytes are spliced to the cell containerd's streaming server.

use std::net::SocketAddr;

use tonic::Status;

use super::cells::Cell;

/// The streaming server of pods in cells, on the node's loopback.
#[derive(Debug)]
pub struct Streaming {}

impl Streaming {
    /// Listens on a free port of the loopback.
    pub async fn start() -> std::io::Result<Self> {
        unimplemented!()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        unimplemented!()
    }

    /// The URL that stands for one of a cell containerd's: single use, one minute, a token of 160 random bits.
    pub fn url(&self, _cell: &Cell, _cell_url: &str) -> Result<String, Status> {
        unimplemented!()
    }
}
