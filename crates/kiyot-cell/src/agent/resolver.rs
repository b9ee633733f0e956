//! DNS for the pod: listeners in the cell, whose queries the daemon sends to the node's name
//! servers.
//!
//! UDP messages are forwarded unchanged, TCP connections byte by byte. The number, size and waiting
//! time of queries are bounded. Queries beyond the bounds are dropped, as by an overloaded name
//! server, and the pod's resolver retries.

mod dns_listener;
mod link_supervisor;
mod resolve_call;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use kiyot_link::resolver::{
    DNS_HEADER_BYTES, MAX_SERVERS, MAX_TCP_CONNECTIONS, MAX_UDP_MESSAGE_BYTES, MAX_UDP_QUERIES,
    QUERY_TIMEOUT,
};
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::{Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

pub(super) use dns_listener::DEVICE;

use super::tunnel::Target;

/// Delay after a socket error; the usual cause is too many open files.
const SOCKET_RETRY_DELAY: Duration = Duration::from_millis(100);

/// UDP query or TCP connection that waits for an answer.
#[derive(Debug)]
struct Query {
    id: u64,
    server: u32,
    tcp: bool,
    message: Bytes,
    /// Receives the answer. Closed if the query has timed out.
    answer: oneshot::Sender<Bytes>,
}

/// DNS proxy of the cell.
#[derive(Debug)]
pub struct Resolver {
    /// True if the cell has a network namespace of its own.
    own_network: bool,
    listeners: Mutex<Listeners>,
    sender: QuerySender,
    /// Queries that no `Resolve` call has read yet. At most one call holds the lock.
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Query>>>,
    /// Cancels the current `Resolve` call.
    current: Mutex<CancellationToken>,
}

/// Listeners of the name servers, and the task that keeps their link up.
#[derive(Debug, Default)]
struct Listeners {
    /// Number of name servers.
    servers: usize,
    /// A task per socket.
    tasks: Vec<AbortOnDropHandle<()>>,
    supervisor: Option<AbortOnDropHandle<()>>,
}

/// Sends queries to the current `Resolve` call.
#[derive(Debug, Clone)]
struct QuerySender {
    queue: mpsc::Sender<Query>,
    last: Arc<AtomicU64>,
    udp_permits: Arc<Semaphore>,
    tcp_permits: Arc<Semaphore>,
    /// Connections that the daemon has not claimed yet, by query id.
    unclaimed: Arc<Mutex<HashMap<u64, Target>>>,
}

impl Resolver {
    /// Creates a resolver without name servers.
    pub fn new(own_network: bool) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_UDP_QUERIES + MAX_TCP_CONNECTIONS);
        let sender = QuerySender {
            queue: sender,
            last: Arc::default(),
            udp_permits: Arc::new(Semaphore::new(MAX_UDP_QUERIES)),
            tcp_permits: Arc::new(Semaphore::new(MAX_TCP_CONNECTIONS)),
            unclaimed: Arc::default(),
        };
        let (queue, current) = (Arc::new(tokio::sync::Mutex::new(receiver)), Mutex::default());
        Self { own_network, listeners: Mutex::default(), sender, queue, current }
    }

    /// Creates listeners for `servers` name servers, unless listeners exist. Blocks briefly; must
    /// be called within the tokio runtime.
    pub fn ensure(self: &Arc<Self>, servers: u32) -> Result<(), Status> {
        let servers = usize::try_from(servers).unwrap_or(usize::MAX);
        if servers == 0 {
            return Ok(());
        }
        if servers > MAX_SERVERS {
            return Err(Status::invalid_argument(format!(
                "{servers} name servers: too many; allowed: at most {MAX_SERVERS}"
            )));
        }
        if !self.own_network {
            return Err(Status::failed_precondition(
                "name servers: not possible, the cell shares the host's network namespace",
            ));
        }
        let mut listeners = self.listeners();
        if listeners.servers > 0 {
            return Ok(());
        }
        let failed = |error| Status::internal(format!("cannot create the DNS listeners: {error}"));
        // Subscribes before the link exists, so that no change is missed.
        let supervisor = link_supervisor::LinkSupervisor::new().map_err(failed)?;
        self.open(&mut listeners, servers).map_err(failed)?;
        listeners.supervisor =
            Some(AbortOnDropHandle::new(tokio::spawn(supervisor.run(Arc::downgrade(self)))));
        Ok(())
    }

    /// Replaces the listeners.
    fn open(&self, listeners: &mut Listeners, servers: usize) -> std::io::Result<()> {
        listeners.tasks.clear();
        let mut tasks = Vec::with_capacity(2 * servers);
        for (server, dns_listener) in (0..).zip(dns_listener::open(servers)?) {
            let (udp, tcp) = (
                Arc::new(UdpSocket::from_std(dns_listener.udp)?),
                TcpListener::from_std(dns_listener.tcp)?,
            );
            tasks.push(AbortOnDropHandle::new(tokio::spawn(serve_udp(
                udp,
                server,
                self.sender.clone(),
            ))));
            tasks.push(AbortOnDropHandle::new(tokio::spawn(serve_tcp(
                tcp,
                server,
                self.sender.clone(),
            ))));
        }
        (listeners.servers, listeners.tasks) = (servers, tasks);
        Ok(())
    }

    /// Replaces the listeners by the same number of new listeners.
    fn reopen(&self) -> std::io::Result<()> {
        let mut listeners = self.listeners();
        let servers = listeners.servers;
        self.open(&mut listeners, servers)
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims an unclaimed connection. It counts against the limit until its tunnel ends. The
    /// tunnel ends with the listener at the latest.
    pub(super) fn take_connection(&self, query: u64) -> Option<Target> {
        self.sender.unclaimed().remove(&query)
    }
}

impl QuerySender {
    fn unclaimed(&self) -> MutexGuard<'_, HashMap<u64, Target>> {
        self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Sends a query and returns its answer; `None` if it times out.
    async fn send_query(&self, id: u64, server: u32, tcp: bool, message: Bytes) -> Option<Bytes> {
        let (answer, answered) = oneshot::channel();
        let query = Query { id, server, tcp, message, answer };
        let sender = async {
            self.queue.send(query).await.ok()?;
            answered.await.ok()
        };
        timeout(QUERY_TIMEOUT, sender).await.ok().flatten().filter(|answer| !answer.is_empty())
    }
}

/// Unclaimed connection, which is closed on drop, because the task may be aborted.
struct Unclaimed<'a> {
    sender: &'a QuerySender,
    id: u64,
}

impl<'a> Unclaimed<'a> {
    fn insert(sender: &'a QuerySender, id: u64, connection: Target) -> Self {
        sender.unclaimed().insert(id, connection);
        Self { sender, id }
    }
}

impl Drop for Unclaimed<'_> {
    fn drop(&mut self) {
        self.sender.unclaimed().remove(&self.id);
    }
}

/// Answers the queries of a UDP socket.
async fn serve_udp(socket: Arc<UdpSocket>, server: u32, sender: QuerySender) {
    // One byte beyond the limit shows that a message was truncated.
    let mut buffer = vec![0; MAX_UDP_MESSAGE_BYTES + 1];
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "datagram not received");
                tokio::time::sleep(SOCKET_RETRY_DELAY).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        if !(DNS_HEADER_BYTES..=MAX_UDP_MESSAGE_BYTES).contains(&length) {
            continue;
        }
        let Ok(permit) = Arc::clone(&sender.udp_permits).try_acquire_owned() else { continue };
        let (message, socket, sender) =
            (Bytes::copy_from_slice(&buffer[..length]), Arc::clone(&socket), sender.clone());
        tasks.spawn(async move {
            if let Some(answer) = sender.send_query(sender.next(), server, false, message).await {
                let _unreachable = socket.send_to(&answer, from).await;
            }
            drop(permit);
        });
    }
}

/// Accepts TCP connections, as many as the semaphore allows.
async fn serve_tcp(listener: TcpListener, server: u32, sender: QuerySender) {
    let mut tasks = tokio::task::JoinSet::new();
    let end = CancellationToken::new();
    // Ends the tunnels even if the task is aborted.
    let _end = end.clone().drop_guard();
    loop {
        let Ok(permit) = Arc::clone(&sender.tcp_permits).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(SOCKET_RETRY_DELAY).await;
            continue;
        };
        while tasks.try_join_next().is_some() {}
        let (sender, end) = (sender.clone(), end.clone());
        tasks.spawn(async move {
            let id = sender.next();
            let _unclaimed = Unclaimed::insert(&sender, id, (stream, permit, end));
            // The answer only tells that the connection was claimed, or never will be.
            sender.send_query(id, server, true, Bytes::new()).await;
        });
    }
}

#[cfg(test)]
mod tests;
