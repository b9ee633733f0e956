//! Name servers that the node alone has: the pod asks here, and the daemon asks them.
//!
//! Messages are carried as they are, and connections byte by byte. How many there are, how large
//! they are and how long they wait is bounded; what is beyond that is not answered, as by a name
//! server that is busy, and the pod's resolver asks again.

mod calls;
mod door;
mod keeper;

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
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

pub(super) use door::DEVICE;

/// How long to wait after a socket failed: too many open files, as a rule.
const AGAIN: Duration = Duration::from_millis(100);

/// A query or a connection that waits for its answer.
#[derive(Debug)]
struct Asked {
    id: u64,
    server: u32,
    tcp: bool,
    message: Bytes,
    /// Gets the answer. Closed: nobody waits any more.
    answer: oneshot::Sender<Bytes>,
}

/// A connection of the pod's, with its place among those that it may have.
type Waiting = (TcpStream, OwnedSemaphorePermit);

/// Name servers of the node, in the cell.
#[derive(Debug)]
pub struct Resolver {
    /// The cell's network is its own.
    own_network: bool,
    doors: Mutex<Doors>,
    asking: Asking,
    /// What no call has taken yet; one call at a time has it.
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Asked>>>,
    /// Ends the call that is.
    current: Mutex<CancellationToken>,
}

/// Where the pod asks.
#[derive(Debug, Default)]
struct Doors {
    /// How many name servers there are.
    servers: usize,
    /// One for each socket.
    tasks: Vec<AbortOnDropHandle<()>>,
    keeper: Option<AbortOnDropHandle<()>>,
}

/// How queries get to the daemon.
#[derive(Debug, Clone)]
struct Asking {
    queue: mpsc::Sender<Asked>,
    last: Arc<AtomicU64>,
    by_udp: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    /// Connections that the daemon has not taken yet, by the ids of their queries.
    waiting: Arc<Mutex<HashMap<u64, Waiting>>>,
}

impl Resolver {
    /// One that has no name servers yet.
    pub fn new(own_network: bool) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_UDP_QUERIES + MAX_TCP_CONNECTIONS);
        let asking = Asking {
            queue: sender,
            last: Arc::default(),
            by_udp: Arc::new(Semaphore::new(MAX_UDP_QUERIES)),
            connections: Arc::new(Semaphore::new(MAX_TCP_CONNECTIONS)),
            waiting: Arc::default(),
        };
        let (queue, current) = (Arc::new(tokio::sync::Mutex::new(receiver)), Mutex::default());
        Self { own_network, doors: Mutex::default(), asking, queue, current }
    }

    /// Has so many name servers from now on, if there are none yet. Blocks for a moment. To be
    /// called within the runtime.
    pub fn ensure(self: &Arc<Self>, servers: u32) -> Result<(), Status> {
        let servers = usize::try_from(servers).unwrap_or(usize::MAX);
        if servers == 0 {
            return Ok(());
        }
        if servers > MAX_SERVERS {
            return Err(Status::invalid_argument(format!(
                "{servers} name servers: at most {MAX_SERVERS} are allowed"
            )));
        }
        if !self.own_network {
            return Err(Status::failed_precondition(
                "the cell shares the host's network namespace: it is given no name servers",
            ));
        }
        let mut doors = self.doors();
        if doors.servers > 0 {
            return Ok(());
        }
        let failed =
            |error| Status::internal(format!("cannot make the cell's name servers: {error}"));
        // It hears of all that happens from before there is anything that could happen.
        let keeper = keeper::Keeper::new().map_err(failed)?;
        self.open(&mut doors, servers).map_err(failed)?;
        doors.keeper =
            Some(AbortOnDropHandle::new(tokio::spawn(keeper.keep(Arc::downgrade(self)))));
        Ok(())
    }

    /// Makes the sockets of so many name servers, in place of those that were.
    fn open(&self, doors: &mut Doors, servers: usize) -> std::io::Result<()> {
        doors.tasks.clear();
        let mut tasks = Vec::with_capacity(2 * servers);
        for (server, door) in (0..).zip(door::open(servers)?) {
            let (udp, tcp) =
                (Arc::new(UdpSocket::from_std(door.udp)?), TcpListener::from_std(door.tcp)?);
            tasks.push(AbortOnDropHandle::new(tokio::spawn(datagrams(
                udp,
                server,
                self.asking.clone(),
            ))));
            tasks.push(AbortOnDropHandle::new(tokio::spawn(connections(
                tcp,
                server,
                self.asking.clone(),
            ))));
        }
        (doors.servers, doors.tasks) = (servers, tasks);
        Ok(())
    }

    /// Makes them anew, as many as there were.
    fn open_again(&self) -> std::io::Result<()> {
        let mut doors = self.doors();
        let servers = doors.servers;
        self.open(&mut doors, servers)
    }

    fn doors(&self) -> MutexGuard<'_, Doors> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection of the pod's that waits to be carried. It counts among the pod's connections as
    /// long as its place is held.
    pub(super) fn take(&self, query: u64) -> Option<Waiting> {
        self.asking.waiting().remove(&query)
    }
}

impl Asking {
    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The answer; `None` if there is none in time.
    async fn ask(&self, id: u64, server: u32, tcp: bool, message: Bytes) -> Option<Bytes> {
        let (answer, answered) = oneshot::channel();
        let asked = Asked { id, server, tcp, message, answer };
        let asking = async {
            self.queue.send(asked).await.ok()?;
            answered.await.ok()
        };
        timeout(QUERY_TIMEOUT, asking).await.ok().flatten().filter(|answer| !answer.is_empty())
    }
}

/// Carries the queries of a socket, and their answers back.
async fn datagrams(socket: Arc<UdpSocket>, server: u32, asking: Asking) {
    // One byte more than is taken: so it is known what was cut.
    let mut buffer = vec![0; MAX_UDP_MESSAGE_BYTES + 1];
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a datagram could not be read");
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        if !(DNS_HEADER_BYTES..=MAX_UDP_MESSAGE_BYTES).contains(&length) {
            continue;
        }
        let Ok(permit) = Arc::clone(&asking.by_udp).try_acquire_owned() else { continue };
        let (message, socket, asking) =
            (Bytes::copy_from_slice(&buffer[..length]), Arc::clone(&socket), asking.clone());
        tasks.spawn(async move {
            if let Some(answer) = asking.ask(asking.next(), server, false, message).await {
                let _gone = socket.send_to(&answer, from).await;
            }
            drop(permit);
        });
    }
}

/// Takes connections, as many at a time as are allowed.
async fn connections(listener: TcpListener, server: u32, asking: Asking) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&asking.connections).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(AGAIN).await;
            continue;
        };
        while tasks.try_join_next().is_some() {}
        let asking = asking.clone();
        tasks.spawn(async move {
            let id = asking.next();
            asking.waiting().insert(id, (stream, permit));
            // The answer is that it was taken, or that it won't be.
            asking.ask(id, server, true, Bytes::new()).await;
            asking.waiting().remove(&id);
        });
    }
}

#[cfg(test)]
mod tests;
