//! A relay that simulates a network between an agent and its gateway: slow, distant, stalling or
//! dead. The kernel's netem is absent on some machines, and affects whole devices.

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kiyot_link::{bootstrap::GatewayAddress, stream::Stream};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    net::{TcpListener, TcpSocket, UnixListener},
    sync::{Mutex as AsyncMutex, mpsc, watch},
    task::AbortHandle,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Bytes that are carried at a time.
const PART_BYTES: usize = 8 * 1024;
/// Most parts of a connection that are in flight in one direction.
const MAX_PARTS_IN_FLIGHT: usize = 128;
/// The kernel's buffer for bytes that a slow relay has not read. A network buffers little, but the
/// kernel's default is more than a slow link carries in a minute.
const RECEIVE_BUFFER_BYTES: u32 = 16 * 1024;

/// The rate and the delay of one direction, for all connections together.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Bytes a second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// The delay of each byte.
    pub delay: Duration,
}

impl Rate {
    /// No limit and no delay.
    pub const UNLIMITED: Self = Self { bytes_per_second: None, delay: Duration::ZERO };

    /// Returns a rate with a delay.
    pub const fn new(bytes_per_second: u64, delay: Duration) -> Self {
        Self { bytes_per_second: Some(bytes_per_second), delay }
    }

    fn time_of(self, bytes: usize) -> Option<Duration> {
        let rate = self.bytes_per_second?;
        Some(Duration::from_secs(1).mul_f64(bytes as f64 / rate as f64))
    }
}

/// A direction of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Client to server.
    Up,
    /// Server to client.
    Down,
}

/// A relay for the connections of a client. Dropping it closes the connections.
#[derive(Debug)]
pub struct Relay {
    /// The address that the client dials.
    pub address: GatewayAddress,
    shared: Arc<Shared>,
    _end: DropGuard,
}

#[derive(Debug)]
struct Shared {
    connections: Mutex<Vec<AbortHandle>>,
    /// Connections up to this number carry no more bytes.
    vanished: watch::Sender<usize>,
    is_stalled: watch::Sender<bool>,
    up: Lane,
    down: Lane,
}

/// A direction of all connections.
#[derive(Debug)]
struct Lane {
    rate: Rate,
    /// Locked while a part is carried, so that connections take turns.
    turn: AsyncMutex<()>,
    carried: AtomicU64,
    /// Connections up to this number are closed in this direction.
    closed: watch::Sender<usize>,
}

impl Lane {
    fn new(rate: Rate) -> Self {
        Self {
            rate,
            turn: AsyncMutex::default(),
            carried: AtomicU64::new(0),
            closed: watch::Sender::new(0),
        }
    }
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(listener) => Ok(Stream::Unix(listener.accept().await?.0)),
            Self::Tcp(listener) => Stream::over_tcp(listener.accept().await?.0),
        }
    }
}

impl Relay {
    /// Takes the place of the gateway's socket in the `state_dir` of a running daemon.
    ///
    /// # Panics
    /// Panics as [`Relay::start`] does.
    pub fn before_gateway(state: &Path, rate: Rate) -> Self {
        let (near, far) = (state.join("gateway.sock"), state.join("far.sock"));
        fs::rename(&near, &far).unwrap();
        Self::start(&GatewayAddress::Unix(near), &GatewayAddress::Unix(far), rate, rate)
    }

    /// Listens on an address (port 0: any port), and relays its connections to another address.
    ///
    /// # Panics
    /// Without a runtime, or if the address is not usable.
    pub fn start(listen: &GatewayAddress, to: &GatewayAddress, up: Rate, down: Rate) -> Self {
        let (listener, address) = match listen {
            GatewayAddress::Unix(path) => {
                (Listener::Unix(UnixListener::bind(path).unwrap()), listen.clone())
            }
            GatewayAddress::Tcp(address) => {
                let socket = TcpSocket::new_v4().unwrap();
                if up.bytes_per_second.is_some() {
                    socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES).unwrap();
                }
                socket.bind(*address).unwrap();
                let listener = socket.listen(1024).unwrap();
                let address = GatewayAddress::Tcp(listener.local_addr().unwrap());
                (Listener::Tcp(listener), address)
            }
        };
        let shared = Arc::new(Shared {
            connections: Mutex::default(),
            vanished: watch::Sender::new(0),
            is_stalled: watch::Sender::new(false),
            up: Lane::new(up),
            down: Lane::new(down),
        });
        let end = CancellationToken::new();
        let (own, to) = (shared.clone(), to.clone());
        tokio::spawn(end.clone().run_until_cancelled_owned(async move {
            loop {
                let near = listener.accept().await.unwrap();
                let mut connections = own.connections.lock().unwrap();
                let number = connections.len() + 1;
                let carried = carry(own.clone(), number, near, to.clone());
                connections.push(tokio::spawn(carried).abort_handle());
            }
        }));
        Self { address, shared, _end: end.drop_guard() }
    }

    /// Closes all current connections.
    pub fn cut(&self) {
        self.shared.connections.lock().unwrap().iter().for_each(AbortHandle::abort);
    }

    /// Stops carrying bytes on all current connections without closing them. New connections work.
    pub fn vanish(&self) {
        self.shared.vanished.send_replace(self.connections());
    }

    /// Closes one direction of all current connections: the receiver reads the end.
    pub fn half_close(&self, direction: Direction) {
        self.shared.lane(direction).closed.send_replace(self.connections());
    }

    /// Stops carrying bytes on all connections until [`Self::resume`]. No byte is lost.
    pub fn stall(&self) {
        self.shared.is_stalled.send_replace(true);
    }

    /// Ends a stall.
    pub fn resume(&self) {
        self.shared.is_stalled.send_replace(false);
    }

    /// Returns the number of carried bytes.
    pub fn carried(&self, direction: Direction) -> u64 {
        self.shared.lane(direction).carried.load(Ordering::Relaxed)
    }

    /// Returns the number of dialled connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.lock().unwrap().len()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Shared {
    fn lane(&self, direction: Direction) -> &Lane {
        match direction {
            Direction::Up => &self.up,
            Direction::Down => &self.down,
        }
    }

    async fn flows(&self) {
        // The sender lives as long as `self`.
        let _ = self.is_stalled.subscribe().wait_for(|is_stalled| !is_stalled).await;
    }
}

async fn carry(shared: Arc<Shared>, number: usize, near: Stream, to: GatewayAddress) {
    let Ok(far) = dial(&to, shared.down.rate).await else { return };
    let ((from_near, to_near), (from_far, to_far)) =
        (tokio::io::split(near), tokio::io::split(far));
    let both = async {
        tokio::join!(
            copy(&shared, Direction::Up, number, from_near, to_far),
            copy(&shared, Direction::Down, number, from_far, to_near),
        )
    };
    let mut vanished = shared.vanished.subscribe();
    tokio::select! {
        _ = both => {}
        // Keeps both streams open.
        () = reached(&mut vanished, number) => std::future::pending().await,
    }
}

/// Waits until a mark includes the connection with this number.
async fn reached(mark: &mut watch::Receiver<usize>, number: usize) {
    // The sender lives as long as the relay.
    let _ = mark.wait_for(|mark| *mark >= number).await;
}

async fn dial(to: &GatewayAddress, down: Rate) -> io::Result<Stream> {
    let (GatewayAddress::Tcp(address), Some(_)) = (to, down.bytes_per_second) else {
        return Stream::dial(to).await;
    };
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
    Stream::over_tcp(socket.connect(*address).await?)
}

/// Copies one direction of a connection until its end, and passes on the end.
async fn copy(
    shared: &Shared,
    direction: Direction,
    number: usize,
    mut from: ReadHalf<Stream>,
    mut to: WriteHalf<Stream>,
) {
    let lane = shared.lane(direction);
    let (sender, mut parts) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_PARTS_IN_FLIGHT);
    let mut closed = lane.closed.subscribe();
    let read = async move {
        let mut part = vec![0; PART_BYTES];
        loop {
            shared.flows().await;
            let length = tokio::select! {
                read = from.read(&mut part) => match read {
                    Ok(length @ 1..) => length,
                    _ => return,
                },
                () = reached(&mut closed, number) => return,
            };
            // Parts take turns in the order of arrival, so that no connection starves.
            if let Some(time) = lane.rate.time_of(length) {
                let _turn = lane.turn.lock().await;
                sleep(time).await;
            }
            lane.carried.fetch_add(length as u64, Ordering::Relaxed);
            let due = Instant::now() + lane.rate.delay;
            if sender.send((due, part[..length].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let write = async move {
        while let Some((due, part)) = parts.recv().await {
            sleep_until(due).await;
            shared.flows().await;
            if to.write_all(&part).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}
