//! Name servers that the node alone has: the pod asks here, and the daemon asks them.
//!
//! Messages are carried as they are. How many there are, how large they are and how long they wait is bounded; what is beyond that is not answered, as
//! by a name server that is busy, and the pod's resolver asks again.

mod calls;
mod door;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use kiyot_link::resolver::{DEADLINE, HEAD, MOST, TCP_CONNECTIONS, TCP_MESSAGE, UDP_MESSAGE, UDP_QUERIES};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

pub(super) use door::DEVICE;

/// How long to wait after a socket failed: too many open files, as a rule.
const AGAIN: Duration = Duration::from_millis(100);

/// A query that waits for its answer.
#[derive(Debug)]
struct Asked {
    server: u32,
    tcp: bool,
    message: Bytes,
    /// Gets the answer. Closed: nobody waits any more.
    answer: oneshot::Sender<Bytes>,
}

/// Name servers of the node, in the cell.
#[derive(Debug)]
pub struct Resolver {
    /// The cell's network is its own.
    own_network: bool,
    doors: Mutex<Vec<AbortOnDropHandle<()>>>,
    asking: Asking,
    /// What no call has taken yet; one call at a time has it.
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Asked>>>,
    /// Ends the call that is.
    current: Mutex<CancellationToken>,
}

/// How queries get to the daemon.
#[derive(Debug, Clone)]
struct Asking {
    queue: mpsc::Sender<Asked>,
    by_udp: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

impl Resolver {
    /// One that has no name servers yet.
    pub fn new(own_network: bool) -> Self {
        let (sender, receiver) = mpsc::channel(UDP_QUERIES + TCP_CONNECTIONS);
        let asking = Asking { queue: sender, by_udp: Arc::new(Semaphore::new(UDP_QUERIES)), connections: Arc::new(Semaphore::new(TCP_CONNECTIONS)) };
        let (queue, current) = (Arc::new(tokio::sync::Mutex::new(receiver)), Mutex::default());
        Self { own_network, doors: Mutex::default(), asking, queue, current }
    }

    /// Has so many name servers from now on, if there are none yet. Blocks for a moment. To be called within the runtime.
    pub fn ensure(&self, servers: u32) -> Result<(), Status> {
        let servers = usize::try_from(servers).unwrap_or(usize::MAX);
        if servers == 0 {
            return Ok(());
        }
        if servers > MOST {
            return Err(Status::invalid_argument(format!("{servers} name servers: at most {MOST} are allowed")));
        }
        if !self.own_network {
            return Err(Status::failed_precondition("the cell shares the host's network namespace: it is given no name servers"));
        }
        let mut doors = self.doors.lock().unwrap_or_else(PoisonError::into_inner);
        if !doors.is_empty() {
            return Ok(());
        }
        let failed = |error| Status::internal(format!("cannot make the cell's name servers: {error}"));
        for (server, door) in (0..).zip(door::open(servers).map_err(failed)?) {
            let udp = Arc::new(UdpSocket::from_std(door.udp).map_err(failed)?);
            let tcp = TcpListener::from_std(door.tcp).map_err(failed)?;
            doors.push(AbortOnDropHandle::new(tokio::spawn(datagrams(udp, server, self.asking.clone()))));
            doors.push(AbortOnDropHandle::new(tokio::spawn(connections(tcp, server, self.asking.clone()))));
        }
        Ok(())
    }
}

impl Asking {
    /// The answer; `None` if there is none in time.
    async fn ask(&self, server: u32, tcp: bool, message: Bytes) -> Option<Bytes> {
        let (answer, answered) = oneshot::channel();
        let asked = Asked { server, tcp, message, answer };
        let asking = async {
            self.queue.send(asked).await.ok()?;
            answered.await.ok()
        };
        timeout(DEADLINE, asking).await.ok().flatten().filter(|answer| !answer.is_empty())
    }
}

/// Carries the queries of a socket, and their answers back.
async fn datagrams(socket: Arc<UdpSocket>, server: u32, asking: Asking) {
    // One byte more than is taken: so it is known what was cut.
    let mut buffer = vec![0; UDP_MESSAGE + 1];
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
        if !(HEAD..=UDP_MESSAGE).contains(&length) {
            continue;
        }
        let Ok(permit) = Arc::clone(&asking.by_udp).try_acquire_owned() else { continue };
        let (message, socket, asking) = (Bytes::copy_from_slice(&buffer[..length]), Arc::clone(&socket), asking.clone());
        tasks.spawn(async move {
            if let Some(answer) = asking.ask(server, false, message).await {
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
            if let Err(error) = connection(stream, server, &asking).await {
                tracing::debug!(%error, "a connection to a name server");
            }
            drop(permit);
        });
    }
}

/// Carries the queries of one connection, one after another (RFC 7766, 8: a length of two bytes, then the message). One that is idle, or has no answer, is closed.
async fn connection(mut stream: TcpStream, server: u32, asking: &Asking) -> std::io::Result<()> {
    loop {
        let read = async {
            let length = stream.read_u16().await?;
            let mut message = vec![0; length.into()];
            stream.read_exact(&mut message).await?;
            std::io::Result::Ok(message)
        };
        let message = timeout(DEADLINE, read).await??;
        if message.len() < HEAD {
            return Ok(());
        }
        let Some(answer) = asking.ask(server, true, message.into()).await else { return Ok(()) };
        let Ok(length) = u16::try_from(answer.len()) else { return Ok(()) };
        let answer = [&length.to_be_bytes()[..], &answer].concat();
        timeout(DEADLINE, stream.write_all(&answer)).await??;
    }
}

#[cfg(test)]
mod tests;
