//! The place of the current connection.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::Channel;
use crate::{connection::Connection, held::Held, watched::Watched};

/// The place of the current connection of one kind to one cell: the side that sets it, while
/// [`Channel`] is the side that calls. Cheap to clone.
pub struct Slot<C = Connection>(Arc<Shared<C>>);

struct Shared<C> {
    name: String,
    held: Watched<Holding<C>>,
    waiting: AtomicUsize,
    demand: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// What a slot holds, and held before.
struct Holding<C> {
    place: Place<C>,
    latest: Option<Latest>,
}

/// What is in the slot.
enum Place<C> {
    Empty,
    Current(C),
    /// For ever.
    Closed,
}

/// The last connection that was accepted, be it there or gone.
struct Latest {
    incarnation: String,
    generation: u64,
    arrival: u64,
}

/// A connection that may become the current one.
#[derive(Debug)]
pub struct Offer<C = Connection> {
    /// The connection.
    pub connection: C,
    /// The run of the agent that made it.
    pub incarnation: String,
    /// Its number in that run.
    pub generation: u64,
    /// Its number among all that the gateway accepted: tells which of two runs is the later one.
    pub arrival: u64,
}

/// Why a connection does not become the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A newer one has been there.
    #[error("a newer connection has been there")]
    Stale,
    /// The cell is gone.
    #[error("the cell is gone")]
    Closed,
}

impl<C> Clone for Slot<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C> fmt::Debug for Slot<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl Slot {
    /// The side that calls.
    pub fn channel(&self) -> Channel {
        Channel(self.clone())
    }
}

impl<C: Held> Slot<C> {
    /// An empty one. The name is for messages: the cell and the kind.
    pub fn new(name: impl Into<String>) -> Self {
        Self(Arc::new(Shared {
            name: name.into(),
            held: Watched::new(Holding { place: Place::Empty, latest: None }),
            waiting: AtomicUsize::new(0),
            demand: OnceLock::new(),
        }))
    }

    /// For messages.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Called, cheaply, whenever a call finds no connection. The first one that is set stays.
    pub fn on_demand(&self, demand: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.demand.set(Box::new(demand));
    }

    /// Makes a connection the current one, and cuts the one before, unless a newer one has been
    /// there.
    pub fn offer(&self, offer: Offer<C>) -> Result<(), Refused> {
        let before = self.0.held.change(|held| {
            if matches!(held.place, Place::Closed) {
                return Err(Refused::Closed);
            }
            if let Some(latest) = &held.latest {
                let newer = if latest.incarnation == offer.incarnation {
                    offer.generation > latest.generation
                } else {
                    offer.arrival > latest.arrival
                };
                if !newer {
                    return Err(Refused::Stale);
                }
            }
            held.latest = Some(Latest {
                incarnation: offer.incarnation,
                generation: offer.generation,
                arrival: offer.arrival,
            });
            Ok(std::mem::replace(&mut held.place, Place::Current(offer.connection)))
        })?;
        if let Place::Current(before) = before {
            before.cut();
        }
        Ok(())
    }

    /// Takes a connection out, if it is the current one: says whether it was.
    pub fn withdraw(&self, connection: &C) -> bool {
        let withdrawn = self.0.held.with(|held| match &held.place {
            Place::Current(current) if current.is(connection) => {
                Some(std::mem::replace(&mut held.place, Place::Empty))
            }
            _ => None,
        });
        // Nobody waits for an empty slot. What was in it is dropped here, without the lock.
        withdrawn.is_some()
    }

    /// Cuts the current connection. No other is let in, and calls fail at once.
    pub fn close(&self) {
        if let Place::Current(current) =
            self.0.held.change(|held| std::mem::replace(&mut held.place, Place::Closed))
        {
            current.cut();
        }
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.0.held.with(|held| matches!(held.place, Place::Closed))
    }

    /// Whether a connection is there.
    pub fn is_connected(&self) -> bool {
        self.now().is_some()
    }

    /// The connection that is there.
    pub fn now(&self) -> Option<C> {
        self.0.held.with(|held| match &held.place {
            Place::Current(connection) if !connection.has_ended() => Some(connection.clone()),
            _ => None,
        })
    }

    /// Returns when a connection is there, which it returns, or the slot is closed.
    pub async fn settled(&self) -> Option<C> {
        let settled = |held: &Holding<C>| match &held.place {
            Place::Current(connection) if !connection.has_ended() => Some(Some(connection.clone())),
            Place::Closed => Some(None),
            _ => None,
        };
        self.0.held.wait_for(settled).await
    }

    /// How many calls wait for a connection.
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::SeqCst)
    }

    /// The current connection, as soon as there is one other than one that failed.
    /// UNAVAILABLE at the deadline, and at once when the slot is closed.
    pub async fn current(&self, failed: Option<&C>, deadline: Instant) -> Result<C, Status> {
        let usable = |held: &Holding<C>| match &held.place {
            Place::Empty => None,
            Place::Current(connection)
                if connection.has_ended() || failed.is_some_and(|failed| failed.is(connection)) =>
            {
                None
            }
            Place::Current(connection) => Some(Ok(connection.clone())),
            Place::Closed => {
                Some(Err(Status::unavailable(format!("{}: the cell is gone", self.0.name))))
            }
        };
        if let Some(now) = self.0.held.with(|held| usable(held)) {
            return now;
        }
        let _waiting = Waiting::new(&self.0.waiting);
        if let Some(demand) = self.0.demand.get() {
            demand();
        }
        let late = |_| {
            Status::unavailable(format!(
                "{}: no connection before the call's deadline",
                self.0.name
            ))
        };
        timeout_at(deadline, self.0.held.wait_for(usable)).await.map_err(late)?
    }
}

/// Counts a call that waits.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
