//! The slot of the current connection.

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
use crate::{connection::Connection, link_connection::LinkConnection, watch::Watch};

/// A slot for a cell's current connection of one kind. The gateway sets it; a [`Channel`] calls
/// over it. Cheap to clone.
pub struct Slot<C = Connection>(Arc<Shared<C>>);

struct Shared<C> {
    name: String,
    state: Watch<SlotState<C>>,
    waiting_calls: AtomicUsize,
    on_demand: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct SlotState<C> {
    current: Current<C>,
    last_accepted: Option<Order>,
}

enum Current<C> {
    Absent,
    /// The connection, which may have ended by now.
    Present(C),
    /// A final state: no connection is accepted again.
    Closed,
}

/// The position of a connection in the order of all connections of its kind.
struct Order {
    incarnation: String,
    generation: u64,
    sequence: u64,
}

/// A connection that may become the current one.
#[derive(Debug)]
pub struct Offer<C = Connection> {
    /// The connection.
    pub connection: C,
    /// The incarnation (run) of the agent that made it.
    pub incarnation: String,
    /// Its number among that incarnation's connections.
    pub generation: u64,
    /// Its number among all connections that the gateway has accepted, which orders incarnations.
    pub sequence: u64,
}

/// An error of offering a connection to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// A newer connection was accepted before.
    #[error("a newer connection was accepted before")]
    Stale,
    /// The slot is closed.
    #[error("the cell has ended")]
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
    /// Returns a channel that calls over this slot's connection.
    pub fn channel(&self) -> Channel {
        Channel(self.clone())
    }
}

impl<C: LinkConnection> Slot<C> {
    /// Creates a slot without a connection. The name is for error messages: kind and cell.
    pub fn new(name: impl Into<String>) -> Self {
        Self(Arc::new(Shared {
            name: name.into(),
            state: Watch::new(SlotState { current: Current::Absent, last_accepted: None }),
            waiting_calls: AtomicUsize::new(0),
            on_demand: OnceLock::new(),
        }))
    }

    /// Returns the name for error messages.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sets the callback for calls that find no connection. It must return at once. Later calls of
    /// this method change nothing.
    pub fn on_demand(&self, callback: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.on_demand.set(Box::new(callback));
    }

    /// Makes a connection the current one and aborts the previous one, unless a newer connection
    /// was accepted before.
    pub fn offer(&self, offer: Offer<C>) -> Result<(), OfferError> {
        let previous = self.0.state.modify(|state| {
            if matches!(state.current, Current::Closed) {
                return Err(OfferError::Closed);
            }
            if let Some(last) = &state.last_accepted {
                let is_newer = if last.incarnation == offer.incarnation {
                    offer.generation > last.generation
                } else {
                    offer.sequence > last.sequence
                };
                if !is_newer {
                    return Err(OfferError::Stale);
                }
            }
            state.last_accepted = Some(Order {
                incarnation: offer.incarnation,
                generation: offer.generation,
                sequence: offer.sequence,
            });
            Ok(std::mem::replace(&mut state.current, Current::Present(offer.connection)))
        })?;
        if let Current::Present(previous) = previous {
            previous.abort();
        }
        Ok(())
    }

    /// Removes a connection if it is the current one. Returns whether it was.
    pub fn withdraw(&self, connection: &C) -> bool {
        let withdrawn = self.0.state.with(|state| match &state.current {
            Current::Present(current) if current.is_same(connection) => {
                Some(std::mem::replace(&mut state.current, Current::Absent))
            }
            _ => None,
        });
        // No wake-up: no task waits for an empty slot. The connection is dropped here, outside the
        // lock.
        withdrawn.is_some()
    }

    /// Aborts the current connection and accepts no other. Calls fail at once.
    pub fn close(&self) {
        if let Current::Present(current) =
            self.0.state.modify(|state| std::mem::replace(&mut state.current, Current::Closed))
        {
            current.abort();
        }
    }

    /// Returns whether the slot is closed.
    pub fn is_closed(&self) -> bool {
        self.0.state.with(|state| matches!(state.current, Current::Closed))
    }

    /// Returns whether the slot has a connection that has not ended.
    pub fn is_connected(&self) -> bool {
        self.current().is_some()
    }

    /// Returns the current connection, unless it has ended.
    pub fn current(&self) -> Option<C> {
        self.0.state.with(|state| match &state.current {
            Current::Present(connection) if !connection.has_ended() => Some(connection.clone()),
            _ => None,
        })
    }

    /// Waits for a connection and returns it, or `None` when the slot is closed.
    pub async fn connected(&self) -> Option<C> {
        let connected = |state: &SlotState<C>| match &state.current {
            Current::Present(connection) if !connection.has_ended() => {
                Some(Some(connection.clone()))
            }
            Current::Closed => Some(None),
            _ => None,
        };
        self.0.state.wait_for(connected).await
    }

    /// Returns the number of calls that wait for a connection.
    pub fn waiting_calls(&self) -> usize {
        self.0.waiting_calls.load(Ordering::SeqCst)
    }

    /// Waits for a connection other than `failed` and returns it. Fails with UNAVAILABLE at the
    /// deadline, and at once when the slot is closed.
    pub async fn acquire(&self, failed: Option<&C>, deadline: Instant) -> Result<C, Status> {
        let usable = |state: &SlotState<C>| match &state.current {
            Current::Absent => None,
            Current::Present(connection)
                if connection.has_ended()
                    || failed.is_some_and(|failed| failed.is_same(connection)) =>
            {
                None
            }
            Current::Present(connection) => Some(Ok(connection.clone())),
            Current::Closed => {
                Some(Err(Status::unavailable(format!("{}: the cell has ended", self.0.name))))
            }
        };
        if let Some(current) = self.0.state.with(|state| usable(state)) {
            return current;
        }
        let _waiting = WaitingCall::new(&self.0.waiting_calls);
        if let Some(on_demand) = self.0.on_demand.get() {
            on_demand();
        }
        let timed_out = |_| {
            Status::unavailable(format!(
                "{}: no connection before the call's deadline",
                self.0.name
            ))
        };
        timeout_at(deadline, self.0.state.wait_for(usable)).await.map_err(timed_out)?
    }
}

/// A guard that counts a call that waits for a connection.
struct WaitingCall<'a>(&'a AtomicUsize);

impl<'a> WaitingCall<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for WaitingCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
