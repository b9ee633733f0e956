//! Byte streams to a cell.

use async_trait::async_trait;
use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use kiyot_proto::cell::TunnelPart;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use crate::backends::milpa::{
    cell_client::{self, MAX_PART_BYTES, QUERY_TIMEOUT},
    failure::{Class, Failure},
    gateway::CellLink,
};

/// Opens tunnels to a cell. Tests have their own implementation.
#[async_trait]
pub(super) trait Tunnels: Send + Sync + 'static {
    /// Opens a tunnel, which sends the parts of `up` to the cell and returns the cell's.
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure>;
}

/// Tunnels over a cell's link.
#[derive(Debug)]
pub(super) struct CellTunnels(pub(super) CellLink);

#[async_trait]
impl Tunnels for CellTunnels {
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Failure>>, Failure> {
        let mut agent = cell_client::agent(&self.0.bulk, MAX_PART_BYTES);
        // Without a deadline, which would end the call: a tunnel lasts as long as its two ends
        // want.
        let opened = agent.tunnel(Request::new(ReceiverStream::new(up)));
        let answer = tokio::time::timeout(QUERY_TIMEOUT, opened)
            .await
            .map_err(|_| {
                Failure::cell(Class::DeadlineExceeded, "the cell did not open a tunnel in time")
            })?
            .map_err(Failure::of_cell)?;
        Ok(answer.into_inner().map_err(Failure::of_cell).boxed())
    }
}
