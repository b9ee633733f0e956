//! Name servers that the node alone has: the pod asks here, and the daemon asks them.
//!
//! Messages are carried as they are, and connections byte by byte. How many there are, how large
//! they are and how long they wait is bounded; what is beyond that is not answered, as by a name
//! server that is busy, and the pod's resolver asks again.

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
use kiyot_link::resolver::{DEADLINE, HEAD, MOST, TCP_CONNECTIONS, UDP_MESSAGE, UDP_QUERIES};
use tokio::{
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

pub(super) use dns_listener::DEVICE;

/// How long to wait after a socket failed: too many open files, as a rule.
const SOCKET_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A query or a connection that waits for its answer.
#[derive(Debug)]
struct Query {
    id: u64,
    server: u32,
    tcp: bool,
    message: Bytes,
    /// Gets the answer. Closed: nobody waits any more.
    answer: oneshot::Sender<Bytes>,
}

/// A connection of the pod's, with its place among those that it may have.
type PendingConnection = (TcpStream, OwnedSemaphorePermit);

/// Name servers of the node, in the cell.
#[derive(Debug)]
pub struct Resolver {
    /// The cell's network is its own.
    own_network: bool,
    listeners: Mutex<Listeners>,
    sender: QuerySender,
    /// What no call has taken yet; one call at a time has it.
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Query>>>,
    /// Ends the call that is.
    current: Mutex<CancellationToken>,
}

/// Where the pod asks.
#[derive(Debug, Default)]
struct Listeners {
    /// How many name servers there are.
    servers: usize,
    /// One for each socket.
    tasks: Vec<AbortOnDropHandle<()>>,
    supervisor: Option<AbortOnDropHandle<()>>,
}

/// How queries get to the daemon.
#[derive(Debug, Clone)]
struct QuerySender {
    queue: mpsc::Sender<Query>,
    last: Arc<AtomicU64>,
    by_udp: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Connections that the daemon has not taken yet, by the ids of their queries.
    waiting: Arc<Mutex<HashMap<u64, PendingConnection>>>,
}

impl Resolver {
    /// One that has no name servers yet.
    pub fn new(own_network: bool) -> Self {
        let (sender, receiver) = mpsc::channel(UDP_QUERIES + TCP_CONNECTIONS);
        let sender = QuerySender {
            queue: sender,
            last: Arc::default(),
            by_udp: Arc::new(Semaphore::new(UDP_QUERIES)),
            connections: Arc::new(Semaphore::new(TCP_CONNECTIONS)),
            waiting: Arc::default(),
        };
        let (queue, current) = (Arc::new(tokio::sync::Mutex::new(receiver)), Mutex::default());
        Self { own_network, listeners: Mutex::default(), sender, queue, current }
    }

    /// Has so many name servers from now on, if there are none yet. Blocks for a moment. To be
    /// called with_timeout the runtime.
    pub fn ensure(self: &Arc<Self>, servers: u32) -> Result<(), Status> {
        let servers = usize::try_from(servers).unwrap_or(usize::MAX);
        if servers == 0 {
            return Ok(());
        }
        if servers > MOST {
            return Err(Status::invalid_argument(format!(
                "{servers} name servers: at most {MOST} are allowed"
            )));
        }
        if !self.own_network {
            return Err(Status::failed_precondition(
                "the cell shares the host's network namespace: it is given no name servers",
            ));
        }
        let mut listeners = self.listeners();
        if listeners.servers > 0 {
            return Ok(());
        }
        let failed =
            |error| Status::internal(format!("cannot make the cell's name servers: {error}"));
        // It hears of all that happens from before there is anything that could happen.
        let supervisor = link_supervisor::LinkSupervisor::new().map_err(failed)?;
        self.open(&mut listeners, servers).map_err(failed)?;
        listeners.supervisor =
            Some(AbortOnDropHandle::new(tokio::spawn(supervisor.run(Arc::downgrade(self)))));
        Ok(())
    }

    /// Makes the sockets of so many name servers, in place of those that were.
    fn open(&self, listeners: &mut Listeners, servers: usize) -> std::io::Result<()> {
        listeners.tasks.clear();
        let mut tasks = Vec::with_capacity(2 * servers);
        for (server, dns_listener) in (0..).zip(dns_listener::open(servers)?) {
            let (udp, tcp) = (
                Arc::new(UdpSocket::from_std(dns_listener.udp)?),
                TcpListener::from_std(dns_listener.tcp)?,
            );
            tasks.push(AbortOnDropHandle::new(tokio::spawn(datagrams(
                udp,
                server,
                self.sender.clone(),
            ))));
            tasks.push(AbortOnDropHandle::new(tokio::spawn(connections(
                tcp,
                server,
                self.sender.clone(),
            ))));
        }
        (listeners.servers, listeners.tasks) = (servers, tasks);
        Ok(())
    }

    /// Makes them anew, as many as there were.
    fn reopen(&self) -> std::io::Result<()> {
        let mut listeners = self.listeners();
        let servers = listeners.servers;
        self.open(&mut listeners, servers)
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection of the pod's that waits to be carried. It counts among the pod's connections as
    /// long as its place is held.
    pub(super) fn take_connection(&self, query: u64) -> Option<PendingConnection> {
        self.sender.waiting().remove(&query)
    }
}

impl QuerySender {
    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, PendingConnection>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The answer; `None` if there is none in time.
    async fn ask(&self, id: u64, server: u32, tcp: bool, message: Bytes) -> Option<Bytes> {
        let (answer, answered) = oneshot::channel();
        let query = Query { id, server, tcp, message, answer };
        let sender = async {
            self.queue.send(query).await.ok()?;
            answered.await.ok()
        };
        timeout(DEADLINE, sender).await.ok().flatten().filter(|answer| !answer.is_empty())
    }
}

/// Carries the queries of a socket, and their answers back.
async fn datagrams(socket: Arc<UdpSocket>, server: u32, sender: QuerySender) {
    // One byte more than is taken: so it is known what was cut.
    let mut buffer = vec![0; UDP_MESSAGE + 1];
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a datagram could not be read");
                tokio::time::sleep(SOCKET_RETRY_DELAY).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        if !(HEAD..=UDP_MESSAGE).contains(&length) {
            continue;
        }
        let Ok(permit) = Arc::clone(&sender.by_udp).try_acquire_owned() else { continue };
        let (message, socket, sender) =
            (Bytes::copy_from_slice(&buffer[..length]), Arc::clone(&socket), sender.clone());
        tasks.spawn(async move {
            if let Some(answer) = sender.ask(sender.next(), server, false, message).await {
                let _gone = socket.send_to(&answer, from).await;
            }
            drop(permit);
        });
    }
}

/// Takes connections, as many at a time as are allowed.
async fn connections(listener: TcpListener, server: u32, sender: QuerySender) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&sender.connections).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(SOCKET_RETRY_DELAY).await;
            continue;
        };
        while tasks.try_join_next().is_some() {}
        let sender = sender.clone();
        tasks.spawn(async move {
            let id = sender.next();
            sender.waiting().insert(id, (stream, permit));
            // The answer is that it was taken, or that it won't be.
            sender.ask(id, server, true, Bytes::new()).await;
            sender.waiting().remove(&id);
        });
    }
}

#[cfg(test)]
mod tests;
