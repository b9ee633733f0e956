//! Exec, attach and port-forward: one HTTP request head is read, its target swapped, and bytes are
//! spliced to the cell containerd's streaming server.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use self::{
    tokens::{Tokens, Way},
    tunnel::CellTunnels,
};
use super::cells::Cell;

mod answer;
mod connection;
#[doc(hidden)]
pub mod fuzzing;
mod head;
#[cfg(test)]
mod tests;
mod tokens;
mod tunnel;

/// Connections that are served at a time; more are closed at once.
const MAX_CONNECTIONS: usize = 2_000;

/// Pause after a failed accept (out of file descriptors), so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Longest URL that is taken from a cell.
const MAX_CELL_URL: usize = 4_096;

/// The streaming server of pods in cells, on the node's loopback. All of its connections end with
/// it.
#[derive(Debug)]
pub struct Streaming {
    address: SocketAddr,
    tokens: Arc<Tokens>,
    _server: AbortOnDropHandle<()>,
}

impl Streaming {
    /// Listens on a free port of the loopback.
    pub async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let tokens = Arc::new(Tokens::default());
        let server = AbortOnDropHandle::new(tokio::spawn(accept(listener, Arc::clone(&tokens))));
        Ok(Self { address, tokens, _server: server })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL that stands for one of a cell containerd's: single use, one minute, a token of 160
    /// random bits.
    ///
    /// INTERNAL if the cell's URL is not one of a streaming server, RESOURCE_EXHAUSTED if too many
    /// are waiting to be used.
    pub fn url(&self, cell: &Cell, cell_url: &str) -> Result<String, Status> {
        let (port, target) = taken_apart(cell_url).ok_or_else(|| {
            let shown: String = cell_url.chars().take(200).collect();
            Status::internal(format!(
                "cell {} gave the streaming URL {shown:?}: allowed is http://<host>:<port>/<path>, {MAX_CELL_URL} bytes at most",
                cell.id
            ))
        })?;
        self.register(Way { port, target, tunnels: Arc::new(CellTunnels(cell.link.clone())) })
    }

    fn register(&self, way: Way) -> Result<String, Status> {
        let token = self.tokens.add(way)?;
        Ok(format!("http://{}/{token}", self.address))
    }
}

/// Port and request target of a URL of a cell's streaming server. Its host is of no interest: the
/// agent dials the cell's loopback.
fn taken_apart(url: &str) -> Option<(u16, String)> {
    if url.len() > MAX_CELL_URL {
        return None;
    }
    let uri: http::Uri = url.parse().ok()?;
    let plain = uri.scheme_str() == Some("http");
    let port = uri.port_u16().filter(|port| plain && *port != 0)?;
    // A URI may have other bytes than a request's first line.
    let target = uri
        .path_and_query()
        .map(http::uri::PathAndQuery::as_str)
        .filter(|target| target.bytes().all(|byte| byte.is_ascii_graphic()))?;
    Some((port, target.to_owned()))
}

async fn accept(listener: TcpListener, tokens: Arc<Tokens>) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((socket, _)) => {
                let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
                    tracing::warn!(
                        limit = MAX_CONNECTIONS,
                        "a streaming connection is closed because as many as allowed are open"
                    );
                    continue;
                };
                let tokens = Arc::clone(&tokens);
                connections.spawn(async move {
                    if let Err(error) = connection::serve(socket, &tokens).await {
                        tracing::debug!(
                            error = &error as &dyn std::error::Error,
                            "a streaming connection ended early"
                        );
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a streaming connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
