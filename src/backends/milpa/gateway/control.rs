//! The control connection: events of a cell, requests for bulk connections and for metrics.
//!
//! It lasts as long as the cell. Because it carries length-delimited messages and no HTTP/2, it
//! needs next to no memory while it is idle.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kiyot_link::{
    channel::{Channel, Offer, OfferError, Slot, sanitize},
    frames::Frames,
    keepalive::{Keepalive, KeepaliveAction},
    link_connection::LinkConnection,
};
use kiyot_proto::{
    bounds,
    cell::{
        Event, FromCell, HelloReply, HelloRequest, MeasureRequest, NextEvent, OpenBulkRequest,
        Ping, Pong, ToCell, from_cell, to_cell,
    },
};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Notify, oneshot},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::message_rate::MessageRate;

/// The most characters that are shown of an agent's build.
const MAX_SHOWN_BUILD_ID_CHARS: usize = 80;

/// The reason why a control connection ended or was not established.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    #[error("connection")]
    Io(#[from] std::io::Error),
    #[error("closed by the agent")]
    Closed,
    #[error("invalid message from the agent")]
    Message(#[from] bounds::BoundsError),
    #[error("first message of the agent is not Hello")]
    NoHello,
    #[error("keepalive timeout: no answer to a ping")]
    KeepaliveTimeout,
    #[error("write timeout: the agent took no message for {} s", .0.as_secs())]
    WriteTimeout(Duration),
}

/// A handle to the current control connection of a cell. Cheap to clone; outlives connections.
#[derive(Debug, Clone)]
pub struct ControlChannel(Slot<ControlConnection>);

impl ControlChannel {
    /// Creates a handle without a connection. The name is for error messages.
    pub fn new(name: impl Into<String>) -> Self {
        Self(Slot::new(name))
    }

    /// Starts a watch of the cell: a snapshot first, then each change, until the connection ends or
    /// another watch starts. Waits for a connection, and fails with UNAVAILABLE after
    /// [`Channel::DEFAULT_TIMEOUT`].
    pub async fn watch(&self) -> Result<EventStream, Status> {
        let connection = self.0.acquire(None, Instant::now() + Channel::DEFAULT_TIMEOUT).await?;
        let watch = connection.0.watches.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(EventStream { connection, watch })
    }

    /// Returns whether the cell is connected.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// Returns the build of the connected agent, truncated to what may be shown.
    pub fn agent_build(&self) -> Option<String> {
        let connection = self.0.current()?;
        Some(connection.hello().build_id.chars().take(MAX_SHOWN_BUILD_ID_CHARS).collect())
    }

    /// Waits for a connection and returns it, or `None` when the cell has ended.
    pub async fn connected(&self) -> Option<ControlConnection> {
        self.0.connected().await
    }

    /// Asks the agent to dial a bulk connection. Waits for a control connection, and fails with
    /// UNAVAILABLE after `connect_timeout`.
    pub(super) async fn open_bulk(&self, connect_timeout: Duration) -> Result<(), Status> {
        let connection = self.0.acquire(None, Instant::now() + connect_timeout).await?;
        connection.request(|pending| pending.open_bulk = true);
        Ok(())
    }

    /// Asks the agent, if connected, to add metrics to its heartbeats for this time. Does not wait.
    pub fn measure(&self, duration: Duration) {
        if let Some(connection) = self.0.current() {
            connection.request(|pending| pending.measure = Some(duration));
        }
    }

    pub(super) fn offer(&self, offer: Offer<ControlConnection>) -> Result<(), OfferError> {
        self.0.offer(offer)
    }

    pub(super) fn withdraw(&self, connection: &ControlConnection) -> bool {
        self.0.withdraw(connection)
    }

    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// The events of a cell, from a watch over a single connection.
#[derive(Debug)]
pub struct EventStream {
    connection: ControlConnection,
    watch: u64,
}

impl EventStream {
    /// Returns the next event, or `None` when the agent has ended the watch. The agent sends an
    /// event only on request of this call.
    ///
    /// Fails with UNAVAILABLE when the connection ends, with ABORTED when another watch has
    /// started, or with the agent's status.
    pub async fn next(&mut self) -> Result<Option<Box<Event>>, Status> {
        let (sender, receiver) = oneshot::channel();
        let next = NextWaiter { watch: self.watch, sender };
        // An older watch must not replace the request of a newer watch.
        let is_latest = self.connection.request(|pending| {
            let is_latest = pending.next.as_ref().is_none_or(|other| other.watch <= next.watch);
            if is_latest {
                pending.next = Some(next);
            }
            is_latest
        });
        if is_latest && self.connection.has_ended() {
            // The connection's task may have ended already, without dropping the request.
            self.connection.request(|pending| pending.next = None);
        }
        let ended = || {
            if self.connection.has_ended() {
                Status::unavailable("the control connection ended")
            } else {
                Status::aborted("another watch began")
            }
        };
        receiver.await.map_err(|_| ended())?
    }
}

/// A control connection, as seen by its users. Cheap to clone.
#[derive(Clone)]
pub struct ControlConnection(Arc<Inner>);

struct Inner {
    hello: HelloReply,
    pending: Mutex<PendingRequests>,
    /// Wakes the connection's task for pending requests.
    wake: Notify,
    /// The number of the last watch.
    watches: AtomicU64,
    end: CancellationToken,
}

/// Requests to the agent that are not sent yet, at most one of each kind.
#[derive(Default)]
struct PendingRequests {
    open_bulk: bool,
    measure: Option<Duration>,
    next: Option<NextWaiter>,
}

/// A waiter for the next event of a watch.
struct NextWaiter {
    watch: u64,
    sender: oneshot::Sender<Result<Option<Box<Event>>, Status>>,
}

impl fmt::Debug for ControlConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlConnection")
            .field("ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

impl LinkConnection for ControlConnection {
    fn abort(&self) {
        self.0.end.cancel();
    }

    fn has_ended(&self) -> bool {
        self.0.end.is_cancelled()
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl ControlConnection {
    /// Creates the handle of a connection whose agent has sent this Hello. Cancelling `end` ends
    /// the connection.
    pub(super) fn new(hello: HelloReply, end: &CancellationToken) -> Self {
        let inner = Inner {
            hello,
            pending: Mutex::default(),
            wake: Notify::new(),
            watches: AtomicU64::new(0),
            end: end.child_token(),
        };
        Self(Arc::new(inner))
    }

    /// Returns the agent's Hello.
    pub fn hello(&self) -> &HelloReply {
        &self.0.hello
    }

    /// Waits until the connection has ended.
    pub async fn ended(&self) {
        self.0.end.cancelled().await;
    }

    /// Sends Hello and returns the agent's Hello. The caller sets a timeout.
    pub(super) async fn exchange_hello<I: AsyncRead + AsyncWrite + Unpin>(
        frames: &mut Frames<I>,
        hello: HelloRequest,
    ) -> Result<HelloReply, ControlError> {
        let hello = to_cell::Message::Hello(hello);
        frames.send(&ToCell { message: Some(hello) }.encode_to_vec()).await?;
        let reply = frames.next().await?.ok_or(ControlError::Closed)?;
        match bounds::decode::<FromCell>(reply)?.message {
            Some(from_cell::Message::Hello(hello)) => Ok(hello),
            _ => Err(ControlError::NoHello),
        }
    }

    /// Runs the connection at its cell's message rate, until it ends or is aborted. The end wakes
    /// waiters for events.
    pub(super) async fn run<I: AsyncRead + AsyncWrite + Unpin>(
        &self,
        frames: &mut Frames<I>,
        rate: &MessageRate,
    ) -> Result<(), ControlError> {
        // Dropped after the guard: a woken waiter must find that the connection has ended.
        let mut waiter = None;
        let _end = EndGuard(self);
        // `run_until_cancelled` would reserve room for the future twice, in each of many
        // connections.
        tokio::select! {
            biased;
            () = self.0.end.cancelled() => Ok(()),
            ended = self.exchange_messages(frames, rate, &mut waiter) => ended,
        }
    }

    async fn exchange_messages<I: AsyncRead + AsyncWrite + Unpin>(
        &self,
        frames: &mut Frames<I>,
        rate: &MessageRate,
        waiter: &mut Option<NextWaiter>,
    ) -> Result<(), ControlError> {
        let mut keepalive = Keepalive::gateway();
        loop {
            let received = async {
                rate.ready().await;
                frames.next().await
            };
            let message = tokio::select! {
                received = received => {
                    let received = received?.ok_or(ControlError::Closed)?;
                    keepalive.received();
                    rate.take(received.len(), Instant::now());
                    match Self::handle(bounds::decode::<FromCell>(received)?, waiter) {
                        Some(reply) => reply,
                        None => continue,
                    }
                }
                () = self.0.wake.notified() => match self.next_request(waiter) {
                    Some(request) => request,
                    None => continue,
                },
                action = keepalive.next_action() => match action {
                    KeepaliveAction::Ping => to_cell::Message::Ping(Ping {}),
                    KeepaliveAction::Close => return Err(ControlError::KeepaliveTimeout),
                },
            };
            let message = ToCell { message: Some(message) }.encode_to_vec();
            timeout(keepalive.timeout(), frames.send(&message))
                .await
                .map_err(|_| ControlError::WriteTimeout(keepalive.timeout()))??;
        }
    }

    /// Handles a message of the agent. Returns the reply, if the message needs one.
    fn handle(message: FromCell, waiter: &mut Option<NextWaiter>) -> Option<to_cell::Message> {
        // Events of an earlier watch have no waiter.
        let sender_for = |waiter: &mut Option<NextWaiter>, watch| {
            waiter.take_if(|next| next.watch == watch).map(|next| next.sender)
        };
        match message.message? {
            from_cell::Message::Event(event) => {
                if let Some(sender) = sender_for(waiter, event.watch) {
                    // The waiter may have been dropped.
                    let _ = sender.send(Ok(event.event.map(Box::new)));
                }
            }
            from_cell::Message::End(end) => {
                if let Some(sender) = sender_for(waiter, end.watch) {
                    let code = Code::from(end.code);
                    let _ = sender.send(if code == Code::Ok {
                        Ok(None)
                    } else {
                        Err(Status::new(code, sanitize(&end.message)))
                    });
                }
            }
            from_cell::Message::Ping(_) => return Some(to_cell::Message::Pong(Pong {})),
            from_cell::Message::Pong(_) | from_cell::Message::Hello(_) => {}
        }
        None
    }

    /// Takes the next pending request for the agent.
    fn next_request(&self, waiter: &mut Option<NextWaiter>) -> Option<to_cell::Message> {
        let mut pending = self.pending();
        let request = if std::mem::take(&mut pending.open_bulk) {
            Some(to_cell::Message::OpenBulk(OpenBulkRequest {}))
        } else {
            let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
            pending
                .measure
                .take()
                .map(|time| to_cell::Message::Measure(MeasureRequest { seconds: seconds(time) }))
        };
        if request.is_some() {
            if pending.measure.is_some() || pending.next.is_some() {
                self.0.wake.notify_one();
            }
            return request;
        }
        let next = pending.next.take()?;
        let message = to_cell::Message::Next(NextEvent { watch: next.watch });
        *waiter = Some(next);
        Some(message)
    }

    fn request<T>(&self, change: impl FnOnce(&mut PendingRequests) -> T) -> T {
        let changed = change(&mut self.pending());
        self.0.wake.notify_one();
        changed
    }

    fn pending(&self) -> MutexGuard<'_, PendingRequests> {
        self.0.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard that ends a connection when its task returns or is dropped.
struct EndGuard<'a>(&'a ControlConnection);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.abort();
        // Requests after this find that the connection has ended.
        self.0.pending().next = None;
    }
}

#[cfg(test)]
mod tests;
