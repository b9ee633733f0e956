//! Byte streams to a cell.

use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt as _, stream::BoxStream};
use kiyot_proto::cell::{TunnelPart, agent_client::AgentClient};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use crate::backends::milpa::gateway::CellLink;

/// How long a cell has to open a tunnel.
const OPEN: Duration = Duration::from_secs(20);

/// Largest part that is taken from a cell.
const MAX_PART: usize = 1 << 20;

/// Opens tunnels to one cell. A test plays one.
#[async_trait]
pub(super) trait Tunnels: Send + Sync + 'static {
    /// One tunnel: what comes on `up` goes to the cell, and what comes from the cell is returned.
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Status>>, Status>;
}

/// Tunnels over a cell's link.
#[derive(Debug)]
pub(super) struct CellTunnels(pub(super) CellLink);

#[async_trait]
impl Tunnels for CellTunnels {
    async fn open(
        &self,
        up: mpsc::Receiver<TunnelPart>,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Status>>, Status> {
        let mut agent = AgentClient::new(self.0.bulk.clone()).max_decoding_message_size(MAX_PART);
        // No deadline of the call's own: a tunnel lasts as long as its two ends want, and the
        // server would end the call at its deadline.
        let opened = agent.tunnel(Request::new(ReceiverStream::new(up)));
        let answer = tokio::time::timeout(OPEN, opened)
            .await
            .map_err(|_| Status::deadline_exceeded("the cell did not open a tunnel in time"))??;
        Ok(answer.into_inner().boxed())
    }
}
