//! The recent events of cells and pods, for operators. In memory only.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use kiyot_engine::{
    engine::{Event, Notice},
    id::CellId,
    placement::Candidate,
    provider::{Instance, ProviderError},
};
use tokio::sync::broadcast;

use super::super::clock;

/// Bounds the kept events.
const MAX_EVENTS: usize = 1000;
/// Bounds the message of an event, in characters.
const MAX_MESSAGE_CHARS: usize = 1000;
/// The capacity of the channel of new events; a slower follower misses events, and sees a gap in
/// their numbers.
const CHANNEL_CAPACITY: usize = 256;

/// The object of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Subject {
    Cell(CellId),
    Pod {
        /// The namespace and name, `namespace/name`.
        name: String,
        /// The uid: a later pod may have the same name.
        uid: String,
    },
    /// All cells of the backend.
    Backend,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Occurrence {
    /// The number, increasing by one.
    pub(crate) number: u64,
    /// The time, in nanoseconds since 1970.
    pub(crate) unix_nanos: i64,
    pub(crate) subject: Subject,
    /// A word, such as "Launched".
    pub(crate) status: &'static str,
    /// The details; may be empty.
    pub(crate) message: String,
}

/// The recent events.
#[derive(Debug)]
pub(crate) struct History {
    events: Mutex<VecDeque<Arc<Occurrence>>>,
    new: broadcast::Sender<Arc<Occurrence>>,
}

impl Default for History {
    fn default() -> Self {
        Self { events: Mutex::default(), new: broadcast::channel(CHANNEL_CAPACITY).0 }
    }
}

impl History {
    pub(crate) fn add(&self, subject: Subject, status: &'static str, message: &str) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let number = events.back().map_or(1, |last| last.number + 1);
        let message = message.chars().take(MAX_MESSAGE_CHARS).collect();
        let event =
            Arc::new(Occurrence { number, unix_nanos: clock::now(), subject, status, message });
        if events.len() == MAX_EVENTS {
            events.pop_front();
        }
        events.push_back(Arc::clone(&event));
        // Under the lock, so that followers get the events in the order of their numbers.
        let _no_follower = self.new.send(event);
    }

    /// Returns the kept events, and a receiver of all later events.
    pub(crate) fn follow(&self) -> (Vec<Arc<Occurrence>>, broadcast::Receiver<Arc<Occurrence>>) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        (events.iter().cloned().collect(), self.new.subscribe())
    }

    pub(super) fn of_cell(&self, cell: &CellId, status: &'static str, message: &str) {
        self.add(Subject::Cell(cell.clone()), status, message);
    }

    /// Adds the outcome of a call to the provider, if operators want to know it.
    pub(super) fn of_outcome(&self, event: &Event) {
        let failed = |cell, status, error: &ProviderError| {
            self.of_cell(cell, status, &error.text());
        };
        match event {
            Event::Launched(cell, Ok(instance)) => {
                self.of_cell(cell, "Launched", &launched(instance));
            }
            Event::Launched(cell, Err(error)) => failed(cell, "LaunchFailed", error),
            Event::Attached(cell, Err(error)) => failed(cell, "BindFailed", error),
            Event::Terminated { cell, outcome: Err(error), .. } => {
                failed(cell, "TerminationFailed", error);
            }
            _ => {}
        }
    }

    /// Adds a notice of the engine, if operators want to know it.
    pub(super) fn of_notice(&self, cell: Option<&CellId>, notice: &Notice) {
        let subject = cell.map_or(Subject::Backend, |cell| Subject::Cell(cell.clone()));
        let (status, message) = match notice {
            Notice::InstanceEnded(reason) => ("InstanceEnded", reason.clone().unwrap_or_default()),
            Notice::Joined(_) | Notice::LabelsLeftOut { .. } => return,
            Notice::Waits(order) => {
                ("Ending", format!("sandbox {order} of its pod waits for its end"))
            }
            Notice::StartsLate { sandbox, within, fastest } => (
                "StartsLate",
                format!(
                    "no offering is known to start within {within:?} for sandbox {sandbox}, the \
                     fastest in {fastest:.1?}"
                ),
            ),
            Notice::Warm(pool) => ("Warm", format!("waits in warm pool {pool}")),
            Notice::JoinedPool(pool) => ("Warm", format!("has no caller, joins warm pool {pool}")),
            Notice::Taken { sandbox, pool } => {
                ("Taken", format!("from warm pool {pool} for sandbox {sandbox}"))
            }
            Notice::PoolFailed { pool, reason, seconds } => {
                ("PoolFailed", format!("warm pool {pool} is filled again in {seconds} s: {reason}"))
            }
            Notice::LaunchesPaused { reason, seconds } => {
                ("LaunchesPaused", format!("no cell is launched for {seconds} s: {reason}"))
            }
            Notice::NotRequested(Candidate { offering, price, accuracy }) => (
                "NotRequested",
                format!("{offering} was not requested, {accuracy} {price} an hour"),
            ),
            Notice::Resumed => ("Resumed", "launch continues after a restart".to_owned()),
            Notice::Started(steps) => {
                let steps = steps.iter().map(|(step, millis)| format!("{step} {millis} ms"));
                ("Started", steps.collect::<Vec<_>>().join(", "))
            }
            Notice::Outage { absent, expected, .. } => (
                "Outage",
                format!("{absent} of {expected} instances not found, taken for an outage"),
            ),
            Notice::Lost { seconds } => ("Lost", format!("its agent was silent for {seconds} s")),
            Notice::CutOff { silent, all } => {
                ("CutOff", format!("{silent} of {all} cells are silent, no cell is lost"))
            }
            Notice::CutOffOver => ("CutOffOver", String::new()),
            Notice::Foreign(instance) => (
                "Foreign",
                format!("instance {instance} was launched by another daemon, no cell is launched"),
            ),
        };
        self.add(subject, status, &message);
    }
}

fn launched(instance: &Instance) -> String {
    let offering = &instance.offering;
    let (kind, zone) = (&offering.instance_type, &offering.zone);
    format!("instance {}, {kind} in {zone}, {}", instance.id, offering.market)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_events_are_dropped_and_long_messages_are_cut() {
        let history = History::default();
        for _ in 0..MAX_EVENTS + 5 {
            history.add(Subject::Backend, "Outage", &"x".repeat(MAX_MESSAGE_CHARS + 1));
        }
        let (events, _) = history.follow();
        assert_eq!((events.len(), events[0].number), (MAX_EVENTS, 6));
        assert_eq!(events[0].message.len(), MAX_MESSAGE_CHARS);
    }

    #[tokio::test]
    async fn follower_gets_every_event_once() {
        let history = History::default();
        history.add(Subject::Backend, "First", "");
        let (events, mut new) = history.follow();
        let (name, uid) = ("a/b".to_owned(), "uid".to_owned());
        let pod = Subject::Pod { name, uid };
        history.add(pod, "Second", "");
        let statuses: Vec<_> = events.iter().map(|event| event.status).collect();
        assert_eq!(statuses, ["First"]);
        let next = new.recv().await.unwrap();
        assert_eq!((next.status, next.number), ("Second", 2));
    }
}
