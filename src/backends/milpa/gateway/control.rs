//! The control connection: events of a cell, and the wish for a bulk connection. It is there for as
//! long as the cell, so at rest it holds next to nothing: no HTTP/2, but single messages.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kiyot_link::{
    channel::{Channel, Offer, Refused, Slot, sanitize},
    frames::Frames,
    held::Held,
    silence::{Due, Silence},
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

/// Why a control connection ended, or did not begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("the connection")]
    Io(#[from] std::io::Error),
    #[error("it has ended")]
    Ended,
    #[error("a message of the agent is refused")]
    Refused(#[from] bounds::Refused),
    #[error("the agent did not say who it is first")]
    NoHello,
    #[error("nothing has been heard, and no answer has come to a ping")]
    Silent,
    #[error("what was sent to it was not taken within {} s", .0.as_secs())]
    Stuck(Duration),
}

/// The control connections of one cell, one after another: whichever is the current one. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct Control(Slot<Line>);

impl Control {
    /// Without a connection. The name is for messages.
    pub fn new(name: impl Into<String>) -> Self {
        Self(Slot::new(name))
    }

    /// Begins to watch the cell: everything that is, then everything that changes, for as long as
    /// the current connection lasts or until somebody else watches. Waits for a connection for a
    /// time, then fails with UNAVAILABLE.
    pub async fn watch(&self) -> Result<Events, Status> {
        let line = self.0.current(None, Instant::now() + Channel::PATIENCE).await?;
        let watch = line.0.watches.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Events { line, watch })
    }

    /// Whether the cell is connected now.
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// The current connection, as soon as there is one; `None` when the cell is gone.
    pub async fn connected(&self) -> Option<Line> {
        self.0.settled().await
    }

    /// Has the agent dial a bulk connection, if it is connected.
    pub(super) async fn open_bulk(&self, within: Duration) -> Result<(), Status> {
        let line = self.0.current(None, Instant::now() + within).await?;
        line.wants(|wanted| wanted.bulk = true);
        Ok(())
    }

    /// Has the agent tell metrics with its heartbeats for a time, if it is connected. Returns at
    /// once.
    pub fn measure(&self, time: Duration) {
        if let Some(line) = self.0.now() {
            line.wants(|wanted| wanted.measure = Some(time));
        }
    }

    pub(super) fn offer(&self, offer: Offer<Line>) -> Result<(), Refused> {
        self.0.offer(offer)
    }

    pub(super) fn withdraw(&self, line: &Line) -> bool {
        self.0.withdraw(line)
    }

    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// The events of a cell, over one connection.
#[derive(Debug)]
pub struct Events {
    line: Line,
    watch: u64,
}

impl Events {
    /// The next one; `None` when the agent ended the watch. The agent sends no other before this is
    /// called again.
    ///
    /// UNAVAILABLE when the connection ends, ABORTED when another watch has begun, or the agent's
    /// own words.
    pub async fn next(&mut self) -> Result<Option<Box<Event>>, Status> {
        let (answer, answered) = oneshot::channel();
        let next = Next { watch: self.watch, answer };
        // One after the other, or the newer one would be taken for the one before.
        let latest = self.line.wants(|wanted| {
            let latest = wanted.next.as_ref().is_none_or(|other| other.watch <= next.watch);
            if latest {
                wanted.next = Some(next);
            }
            latest
        });
        if latest && self.line.has_ended() {
            // Nobody may be there to see the wish.
            self.line.wants(|wanted| wanted.next = None);
        }
        let ended = || {
            if self.line.has_ended() {
                Status::unavailable("the control connection ended")
            } else {
                Status::aborted("another watch began")
            }
        };
        answered.await.map_err(|_| ended())?
    }
}

/// One control connection, as those see it who want something of the cell. Cheap to clone.
#[derive(Clone)]
pub struct Line(Arc<Inner>);

struct Inner {
    hello: HelloReply,
    wanted: Mutex<Wanted>,
    ring: Notify,
    watches: AtomicU64,
    end: CancellationToken,
}

/// What the agent is to be told. Bounded by what it is: each wish is there once.
#[derive(Default)]
struct Wanted {
    bulk: bool,
    measure: Option<Duration>,
    next: Option<Next>,
}

/// Somebody waits for an event.
struct Next {
    watch: u64,
    answer: oneshot::Sender<Result<Option<Box<Event>>, Status>>,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

impl Held for Line {
    fn cut(&self) {
        self.0.end.cancel();
    }

    fn has_ended(&self) -> bool {
        self.0.end.is_cancelled()
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Line {
    /// One whose agent said this of itself, and that ends with `end`.
    pub(super) fn new(hello: HelloReply, end: &CancellationToken) -> Self {
        let inner = Inner {
            hello,
            wanted: Mutex::default(),
            ring: Notify::new(),
            watches: AtomicU64::new(0),
            end: end.child_token(),
        };
        Self(Arc::new(inner))
    }

    /// What the agent said of itself.
    pub fn hello(&self) -> &HelloReply {
        &self.0.hello
    }

    /// Returns when it has ended.
    pub async fn ended(&self) {
        self.0.end.cancelled().await;
    }

    /// Asks the agent who it is. The caller bounds its time.
    pub(super) async fn greet<I: AsyncRead + AsyncWrite + Unpin>(
        frames: &mut Frames<I>,
        hello: HelloRequest,
    ) -> Result<HelloReply, Broken> {
        let hello = to_cell::Message::Hello(hello);
        frames.send(&ToCell { message: Some(hello) }.encode_to_vec()).await?;
        let answer = frames.next().await?.ok_or(Broken::Ended)?;
        match bounds::decode::<FromCell>(answer)?.message {
            Some(from_cell::Message::Hello(hello)) => Ok(hello),
            _ => Err(Broken::NoHello),
        }
    }

    /// Carries wishes and events until the connection ends or is cut. Then whoever waits is told.
    pub(super) async fn carry<I: AsyncRead + AsyncWrite + Unpin>(
        &self,
        frames: &mut Frames<I>,
    ) -> Result<(), Broken> {
        // Dropped last: who waits must find that it has ended.
        let mut waits = None;
        let _ended = Ended(self);
        // Not by `run_until_cancelled`, which has room for the future twice, in each of very many
        // connections.
        tokio::select! {
            biased;
            () = self.0.end.cancelled() => Ok(()),
            ended = self.converse(frames, &mut waits) => ended,
        }
    }

    async fn converse<I: AsyncRead + AsyncWrite + Unpin>(
        &self,
        frames: &mut Frames<I>,
        waits: &mut Option<Next>,
    ) -> Result<(), Broken> {
        let mut silence = Silence::of_gateway();
        loop {
            let message = tokio::select! {
                heard = frames.next() => {
                    let heard = heard?.ok_or(Broken::Ended)?;
                    silence.broken();
                    match self.heard(bounds::decode::<FromCell>(heard)?, waits) {
                        Some(answer) => answer,
                        None => continue,
                    }
                }
                () = self.0.ring.notified() => match self.wish(waits) {
                    Some(wish) => wish,
                    None => continue,
                },
                due = silence.due() => match due {
                    Due::Ask => to_cell::Message::Ping(Ping {}),
                    Due::End => return Err(Broken::Silent),
                },
            };
            let message = ToCell { message: Some(message) }.encode_to_vec();
            timeout(silence.patience(), frames.send(&message))
                .await
                .map_err(|_| Broken::Stuck(silence.patience()))??;
        }
    }

    /// Takes what the agent said. Returns what is to be answered.
    fn heard(&self, heard: FromCell, waits: &mut Option<Next>) -> Option<to_cell::Message> {
        // What was sent to a watch before the current one is not for it.
        let of = |waits: &mut Option<Next>, watch| {
            waits.take_if(|next| next.watch == watch).map(|next| next.answer)
        };
        match heard.message? {
            from_cell::Message::Event(event) => {
                if let Some(answer) = of(waits, event.watch) {
                    // Whoever waited may have gone.
                    let _ = answer.send(Ok(event.event.map(Box::new)));
                }
            }
            from_cell::Message::End(end) => {
                if let Some(answer) = of(waits, end.watch) {
                    let code = Code::from(end.code);
                    let _ = answer.send(if code == Code::Ok {
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

    /// The next wish for the agent, if there is one.
    fn wish(&self, waits: &mut Option<Next>) -> Option<to_cell::Message> {
        let mut wanted = self.wanted();
        let wish = if std::mem::take(&mut wanted.bulk) {
            Some(to_cell::Message::OpenBulk(OpenBulkRequest {}))
        } else {
            let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
            wanted
                .measure
                .take()
                .map(|time| to_cell::Message::Measure(MeasureRequest { seconds: seconds(time) }))
        };
        if wish.is_some() {
            if wanted.measure.is_some() || wanted.next.is_some() {
                self.0.ring.notify_one();
            }
            return wish;
        }
        let next = wanted.next.take()?;
        let message = to_cell::Message::Next(NextEvent { watch: next.watch });
        *waits = Some(next);
        Some(message)
    }

    fn wants<T>(&self, change: impl FnOnce(&mut Wanted) -> T) -> T {
        let changed = change(&mut self.wanted());
        self.0.ring.notify_one();
        changed
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.0.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of a connection, whatever way it came.
struct Ended<'a>(&'a Line);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.cut();
        // Who comes later sees that it has ended.
        self.0.wanted().next = None;
    }
}

#[cfg(test)]
mod tests;
