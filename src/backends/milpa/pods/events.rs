//! Container events (`GetContainerEvents`), each with the status of its pod and of all the pod's
//! containers at that moment.
//!
//! An event is encoded under the lock of its change. So events have the order of the changes, and a
//! status that is read after an event is not older. As in containerd, a sandbox has events, too: it
//! is created, started, stopped and deleted by its own id. Without subscribers no events are
//! encoded.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use kiyot_engine::id::SandboxId;
use kiyot_proto::cri::{self, ContainerEventType};
use prost::Message;
use tokio::sync::mpsc;

use super::{Cache, Container, Pods, response};
use crate::backends::milpa::clock;

/// Most events that wait for a subscriber. A kubelet reads events as they come, even from some
/// hundred pods at once.
pub(super) const MAX_QUEUED_EVENTS: usize = 1024;
/// Most bytes of events that wait for a subscriber.
pub(super) const MAX_QUEUED_BYTES: usize = 8 << 20;

#[derive(Debug, Default)]
pub(super) struct Subscribers(Vec<Subscriber>);

#[derive(Debug)]
struct Subscriber {
    events: mpsc::Sender<Bytes>,
    queued_bytes: Arc<AtomicUsize>,
}

/// The events since a subscription.
#[derive(Debug)]
pub(crate) struct Events {
    events: mpsc::Receiver<Bytes>,
    queued_bytes: Arc<AtomicUsize>,
}

impl Events {
    /// Returns the next event, an encoded `ContainerEventResponse`. Fails for good after an event
    /// was lost because too many waited.
    pub(crate) async fn next(&mut self) -> Result<Bytes, EventLost> {
        match self.events.recv().await {
            Some(event) => {
                self.queued_bytes.fetch_sub(event.len(), Ordering::Relaxed);
                Ok(event)
            }
            None => Err(EventLost),
        }
    }
}

/// An event was lost, because its subscriber was too far behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "events of containers in cells were lost, because they were not read in time: \
     allowed are {MAX_QUEUED_EVENTS} waiting events of {MAX_QUEUED_BYTES} bytes in all; list again"
)]
pub(crate) struct EventLost;

impl Subscribers {
    pub(super) fn add(&mut self) -> Events {
        self.0.retain(|subscriber| !subscriber.events.is_closed());
        let (sender, events) = mpsc::channel(MAX_QUEUED_EVENTS);
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        self.0.push(Subscriber { events: sender, queued_bytes: Arc::clone(&queued_bytes) });
        Events { events, queued_bytes }
    }

    /// Sends an event to all subscribers. A subscriber that is too far behind is dropped, and reads
    /// an error after the waiting events.
    pub(super) fn send(&mut self, event: &Bytes) {
        self.0.retain(|subscriber| {
            let waiting =
                subscriber.queued_bytes.fetch_add(event.len(), Ordering::Relaxed) + event.len();
            waiting <= MAX_QUEUED_BYTES && subscriber.events.try_send(event.clone()).is_ok()
        });
    }
}

impl Pods {
    /// Subscribes to the events from now on.
    pub(crate) fn events(&self) -> Events {
        self.write().subscribers.add()
    }
}

impl Cache {
    /// Emits an event of a sandbox or of its container. The sandbox must be in the cache.
    pub(super) fn emit(&mut self, event_type: ContainerEventType, id: &str, sandbox: &SandboxId) {
        if self.subscribers.0.is_empty() {
            return;
        }
        let Some(sandbox) = self.sandboxes.get(sandbox) else { return };
        let event = cri::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: event_type.into(),
            // By the node's clock: the kubelet compares it with the time of its last list.
            created_at: clock::now(),
            pod_sandbox_status: Some(response::sandbox_status(&sandbox.meta(), sandbox.ready)),
            containers_statuses: sandbox
                .containers
                .iter()
                .filter_map(|id| self.containers.get(id))
                .map(Container::answer)
                .collect(),
        };
        self.subscribers.send(&event.encode_to_vec().into());
    }

    /// Emits the events of a container's transition.
    pub(super) fn emit_transition(&mut self, before: cri::ContainerState, container: &Container) {
        use cri::ContainerState::{ContainerExited as Exited, ContainerRunning as Running};
        let after = container.state();
        // A container that exited before its start was reported has started; a failed start has
        // not.
        let has_started =
            after == Running || after == Exited && container.status.started_unix_nanos > 0;
        if !matches!(before, Running | Exited) && has_started {
            self.emit(
                ContainerEventType::ContainerStartedEvent,
                container.id.as_str(),
                &container.sandbox,
            );
        }
        if before != Exited && after == Exited {
            self.emit(
                ContainerEventType::ContainerStoppedEvent,
                container.id.as_str(),
                &container.sandbox,
            );
        }
    }
}
