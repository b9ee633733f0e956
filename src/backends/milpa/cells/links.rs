//! The links to agents.

use std::{net::IpAddr, time::Duration};

use async_trait::async_trait;
use kiyot_engine::id::CellId;
use kiyot_link::bootstrap::Bootstrap;
use kiyot_proto::cell::{ShutdownRequest, agent_client::AgentClient};

use crate::backends::milpa::gateway::{CellLink, Gateway};

/// Bounds the time in which an agent ends all containers.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// The operations of the gateway that cells use.
#[async_trait]
pub trait Links: std::fmt::Debug + Send + Sync + 'static {
    /// Returns the link to a cell, creating it if needed.
    fn link(&self, cell: &CellId) -> CellLink;
    /// Returns the data with which a cell's agent connects to the gateway, perhaps from another
    /// machine.
    fn bootstrap(&self, cell: &CellId, token: &str, is_remote: bool) -> Bootstrap;
    /// Returns the address from which the cell's agent connected last, if known.
    fn peer_address(&self, cell: &CellId) -> Option<IpAddr>;
    /// Closes and removes the link to a cell.
    fn forget(&self, cell: &CellId);
    /// Makes the agent end all containers and power off. Returns whether it has confirmed that no
    /// container runs.
    async fn shut_down(&self, cell: &CellId) -> bool;
}

#[async_trait]
impl Links for Gateway {
    fn link(&self, cell: &CellId) -> CellLink {
        Self::link(self, cell)
    }

    fn bootstrap(&self, cell: &CellId, token: &str, is_remote: bool) -> Bootstrap {
        Self::bootstrap(self, cell, token, is_remote)
    }

    fn peer_address(&self, cell: &CellId) -> Option<IpAddr> {
        Self::peer_address(self, cell)
    }

    fn forget(&self, cell: &CellId) {
        Self::forget(self, cell);
    }

    async fn shut_down(&self, cell: &CellId) -> bool {
        let mut agent = AgentClient::new(Self::link(self, cell).bulk);
        let call = agent.shutdown(ShutdownRequest {});
        match tokio::time::timeout(SHUTDOWN_TIMEOUT, call).await {
            Ok(Ok(_)) => true,
            Ok(Err(status)) => {
                tracing::warn!(%cell, status = status.message(), "agent did not end its pod");
                false
            }
            Err(_) => {
                let seconds = SHUTDOWN_TIMEOUT.as_secs();
                tracing::warn!(%cell, seconds, "agent did not end its pod in time");
                false
            }
        }
    }
}
