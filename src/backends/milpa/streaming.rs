//! Exec, attach and port-forward: reads the head of an HTTP request, replaces its target, and
//! splices bytes to the streaming server of the cell's containerd.

use std::{
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use futures::{FutureExt as _, future::OptionFuture};
use kiyot_engine::id::CellId;
use kiyot_link::log_limit::LogLimit;
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

use self::{
    connection::StreamError,
    tokens::{Route, Tokens},
    tunnel::CellTunnels,
};
use super::{
    cell_client::CellClient,
    cells::Cell,
    failure::{Code, Failure},
};

mod body;
mod connection;
#[cfg(debug_assertions)]
#[path = "../../../fuzz/inside/streaming.rs"]
pub mod fuzzing;
mod head;
#[cfg(test)]
mod tests;
mod tokens;
mod tunnel;

/// Most streams at a time; further streams are refused.
const MAX_STREAMS: usize = 2_000;

/// Most streams of a cell at a time, as in its agent.
const MAX_CELL_STREAMS: usize = 96;

/// Most connections that have not sent a request with a token. A further connection ends the
/// oldest, once the oldest has had [`HEAD_GRACE`].
const MAX_UNREAD_HEADS: usize = 64;

/// Time for a connection to send its request, before another connection may end it.
const HEAD_GRACE: Duration = Duration::from_millis(200);

/// Pause after a failed accept (out of file descriptors), so that the loop doesn't spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Pause between attempts to listen while the loopback has no free port.
const LISTEN_PAUSE: Duration = Duration::from_secs(2);

/// Longest URL that is accepted from a cell, in bytes.
const MAX_CELL_URL_BYTES: usize = 4_096;

/// Streaming server of pods in cells, on the node's loopback. Dropping it ends its connections.
#[derive(Debug)]
pub struct Streaming {
    /// Empty until the loopback has a free port.
    address: Arc<OnceLock<SocketAddr>>,
    tokens: Arc<Tokens>,
    cells: CellStreams,
    _server: AbortOnDropHandle<()>,
}

impl Streaming {
    /// Listens on a free port of the loopback. Retries in a task without a free port, because any
    /// user can take all ports.
    pub async fn start() -> Self {
        let (address, tokens) = (Arc::new(OnceLock::new()), Arc::new(Tokens::default()));
        let listener = match listen(&address).await {
            Ok(listener) => Some(listener),
            Err(error) => {
                tracing::error!(%error, retry = ?LISTEN_PAUSE, "exec, attach and port-forward have \
                    no port of the loopback");
                None
            }
        };
        let (later, accepting) = (Arc::clone(&address), Arc::clone(&tokens));
        let server = tokio::spawn(async move {
            let mut listener = listener;
            let listener = loop {
                match listener.take() {
                    Some(listener) => break listener,
                    None => sleep(LISTEN_PAUSE).await,
                }
                listener = listen(&later).await.ok();
            };
            accept(listener, accepting).await;
        });
        let (cells, server) = (CellStreams::default(), AbortOnDropHandle::new(server));
        Self { address, tokens, cells, _server: server }
    }

    /// Returns the address of the listener; `None` until the loopback has a free port.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address.get().copied()
    }

    /// Returns a URL that replaces a URL of the cell's containerd. It has a token of 160 random
    /// bits, and is valid once, for a minute.
    ///
    /// Fails with INTERNAL if the cell's URL is not of a streaming server, RESOURCE_EXHAUSTED if
    /// too many URLs are unused, UNAVAILABLE if the loopback has no free port.
    pub fn url(&self, cell: &Cell, cell_url: &str) -> Result<String, Failure> {
        let (port, target) = parse_cell_url(cell_url).ok_or_else(|| {
            let shown: String = cell_url.chars().take(200).collect();
            Failure::cell(Code::Internal, format!(
                "cell {} gave the streaming URL {shown:?}: allowed is http://<host>:<port>/<path>, \
                 {MAX_CELL_URL_BYTES} bytes at most",
                cell.id
            ))
        })?;
        self.register(Route {
            port,
            target,
            tunnels: Arc::new(CellTunnels(CellClient::new(cell))),
            streams: self.cells.of(&cell.id),
        })
    }

    fn register(&self, route: Route) -> Result<String, Failure> {
        let address = self.address().ok_or_else(|| {
            Failure::node(Code::Unavailable, "all ports of the node's loopback are taken")
        })?;
        let token = self.tokens.add(route)?;
        Ok(format!("http://{address}/{token}"))
    }
}

/// Limits of the streams of each cell, for as long as a token or a stream uses them.
#[derive(Debug, Default)]
struct CellStreams(Mutex<HashMap<CellId, Weak<Semaphore>>>);

impl CellStreams {
    /// Returns the limit of a cell.
    fn of(&self, cell: &CellId) -> Arc<Semaphore> {
        let mut cells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(streams) = cells.get(cell).and_then(Weak::upgrade) {
            return streams;
        }
        cells.retain(|_, streams| streams.strong_count() > 0);
        let streams = Arc::new(Semaphore::new(MAX_CELL_STREAMS));
        cells.insert(cell.clone(), Arc::downgrade(&streams));
        streams
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

async fn listen(address: &OnceLock<SocketAddr>) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let _ = address.set(listener.local_addr()?);
    Ok(listener)
}

async fn accept(listener: TcpListener, tokens: Arc<Tokens>) {
    let streams = Arc::new(Semaphore::new(MAX_STREAMS));
    let (mut heads, mut connections) = (JoinSet::new(), JoinSet::new());
    // Tasks of `heads` with the ends of their graces, oldest first.
    let mut unread: VecDeque<(AbortHandle, Instant)> = VecDeque::new();
    let (head_lines, stream_lines) = (LogLimit::default(), LogLimit::default());
    loop {
        unread.retain(|(head, _)| !head.is_finished());
        let oldest = unread.front().filter(|_| unread.len() >= MAX_UNREAD_HEADS);
        let grace = OptionFuture::from(oldest.map(|(_, end)| sleep_until(*end)));
        let accepted = tokio::select! {
            biased;
            Some(read) = heads.join_next() => {
                match read {
                    Ok(Ok(stream)) => {
                        connections.spawn(async move {
                            if let Err(error) = connection::serve(stream).await {
                                log_early_end(&error);
                            }
                        });
                    }
                    Ok(Err(error)) => {
                        if let StreamError::TooManyStreams { .. } = error
                            && let Some(suppressed) = stream_lines.admit()
                        {
                            tracing::warn!(%error, suppressed, "streaming request refused");
                        }
                        log_early_end(&error);
                    }
                    // Aborted as the oldest.
                    Err(_) => {}
                }
                continue;
            }
            Some(_) = connections.join_next() => continue,
            accepted = grace.then(|_| listener.accept()) => accepted,
        };
        match accepted {
            Ok((socket, _)) => {
                if unread.len() >= MAX_UNREAD_HEADS
                    && let Some((oldest, _)) = unread.pop_front()
                {
                    oldest.abort();
                    if let Some(suppressed) = head_lines.admit() {
                        tracing::warn!(
                            limit = MAX_UNREAD_HEADS,
                            suppressed,
                            "streaming connection without a request closed at the limit"
                        );
                    }
                }
                let (tokens, streams) = (Arc::clone(&tokens), Arc::clone(&streams));
                let head = async move { connection::accept(socket, &tokens, &streams).await };
                unread.push_back((heads.spawn(head), Instant::now() + HEAD_GRACE));
            }
            Err(error) => {
                tracing::warn!(%error, "streaming connection not accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn log_early_end(error: &StreamError) {
    tracing::debug!(error = error as &dyn std::error::Error, "streaming connection ended early");
}
