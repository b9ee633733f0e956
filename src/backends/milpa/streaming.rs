//! Exec, attach and port-forward: the head of a HTTP request is read and its target replaced, and
//! then bytes are spliced to the streaming server of the cell's containerd.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};
use tokio_util::task::AbortOnDropHandle;

use self::{
    tokens::{Route, Tokens},
    tunnel::CellTunnels,
};
use super::{
    cell_client::CellClient,
    cells::Cell,
    failure::{Class, Failure},
};

mod body;
mod connection;
#[cfg(any(test, fuzzing, debug_assertions))]
#[doc(hidden)]
pub mod fuzzing;
mod head;
#[cfg(test)]
mod tests;
mod tokens;
mod tunnel;

/// Most connections at a time; further ones are closed at once.
const MAX_CONNECTIONS: usize = 2_000;

/// Pause after a failed accept (out of file descriptors), so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Longest URL that is accepted from a cell, in bytes.
const MAX_CELL_URL_BYTES: usize = 4_096;

/// Streaming server of pods in cells, on the node's loopback. Dropping it ends its connections.
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

    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a URL in place of a URL of the cell's containerd: for one use within a minute, with
    /// a token of 160 random bits.
    ///
    /// INTERNAL if the cell's URL is not of a streaming server, RESOURCE_EXHAUSTED if too many URLs
    /// are unused.
    pub fn url(&self, cell: &Cell, cell_url: &str) -> Result<String, Failure> {
        let (port, target) = parse_cell_url(cell_url).ok_or_else(|| {
            let shown: String = cell_url.chars().take(200).collect();
            Failure::cell(Class::Internal, format!(
                "cell {} gave the streaming URL {shown:?}: allowed is http://<host>:<port>/<path>, \
                 {MAX_CELL_URL_BYTES} bytes at most",
                cell.id
            ))
        })?;
        self.register(Route { port, target, tunnels: Arc::new(CellTunnels(CellClient::new(cell))) })
    }

    fn register(&self, route: Route) -> Result<String, Failure> {
        let token = self.tokens.add(route)?;
        Ok(format!("http://{}/{token}", self.address))
    }
}

/// Returns port and request target of a URL of a cell's streaming server. Its host is ignored,
/// because the agent dials the cell's loopback.
fn parse_cell_url(url: &str) -> Option<(u16, String)> {
    if url.len() > MAX_CELL_URL_BYTES {
        return None;
    }
    let uri: http::Uri = url.parse().ok()?;
    let plain = uri.scheme_str() == Some("http");
    let port = uri.port_u16().filter(|port| plain && *port != 0)?;
    // A URI allows more bytes than a request line.
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
                        "streaming connection closed at the connection limit"
                    );
                    continue;
                };
                let tokens = Arc::clone(&tokens);
                connections.spawn(async move {
                    if let Err(error) = connection::serve(socket, &tokens).await {
                        tracing::debug!(
                            error = &error as &dyn std::error::Error,
                            "streaming connection ended early"
                        );
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "streaming connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
