//! Byte streams to a cell.

use async_trait::async_trait;
use futures::stream::BoxStream;
use kiyot_proto::cell::TunnelPart;
use tokio::sync::mpsc;

use crate::backends::milpa::{cell_client::CellClient, failure::Failure};

/// Opens tunnels to a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait Tunnels: Send + Sync + 'static {
    /// Opens a tunnel: sends the parts of `up` to the cell, and returns the parts from the cell.
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure>;
}

/// Tunnels over a cell's link.
#[derive(Debug)]
pub(super) struct CellTunnels(pub(super) CellClient);

#[async_trait]
impl Tunnels for CellTunnels {
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure> {
        self.0.tunnel(up).await
    }
}
