//! News of containers, as `GetContainerEvents` has them: each with the status of its pod and of all
//! the pod's containers at that moment.
//!
//! They are made under the lock of the change that they tell of, so their order is that of the
//! changes, and who asks after an event is answered what it said or something newer. A sandbox is a
//! container here too, as with containerd: it is created, started, stopped and deleted by its own
//! id. Nothing is made while nobody reads.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use kiyot_proto::cri::{self, ContainerEventType};
use prost::Message;
use tokio::sync::mpsc;
use tonic::Status;

use super::{Cache, Container, Pods, response};
use crate::backends::milpa::{clock, id::SandboxId};

/// Events that wait for one reader at most: a kubelet takes them as they come, those of some
/// hundred pods at once included.
pub(super) const WAITING: usize = 1024;
/// The same in bytes.
pub(super) const WAITING_BYTES: usize = 8 << 20;

/// Who reads events.
#[derive(Debug, Default)]
pub(super) struct Readers(Vec<Reader>);

#[derive(Debug)]
struct Reader {
    events: mpsc::Sender<Bytes>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// Events from a moment on.
#[derive(Debug)]
pub(crate) struct Events {
    events: mpsc::Receiver<Bytes>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl Events {
    /// The next one, an encoded `ContainerEventResponse`. `RESOURCE_EXHAUSTED` in place of the
    /// first that was lost, because too many waited; no more come then.
    pub(crate) async fn next(&mut self) -> Result<Bytes, Status> {
        match self.events.recv().await {
            Some(event) => {
                self.waiting_bytes.fetch_sub(event.len(), Ordering::Relaxed);
                Ok(event)
            }
            None => Err(Status::resource_exhausted(format!(
                "events of containers in cells were lost, for they were not read in time: allowed are {WAITING} that wait, of {WAITING_BYTES} bytes; list again"
            ))),
        }
    }
}

impl Readers {
    pub(super) fn add(&mut self) -> Events {
        self.0.retain(|reader| !reader.events.is_closed());
        let (sender, events) = mpsc::channel(WAITING);
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        self.0.push(Reader { events: sender, waiting_bytes: Arc::clone(&waiting_bytes) });
        Events { events, waiting_bytes }
    }

    /// Tells all readers. One that is too far behind is told no more: it sees so when it has read
    /// what waits.
    pub(super) fn tell(&mut self, event: &Bytes) {
        self.0.retain(|reader| {
            let waiting =
                reader.waiting_bytes.fetch_add(event.len(), Ordering::Relaxed) + event.len();
            waiting <= WAITING_BYTES && reader.events.try_send(event.clone()).is_ok()
        });
    }
}

impl Pods {
    /// What happens from now on.
    pub(crate) fn events(&self) -> Events {
        self.write().readers.add()
    }
}

impl Cache {
    /// Tells that something has happened to a container of a sandbox, or to the sandbox, which must
    /// be there.
    pub(super) fn announce(&mut self, what: ContainerEventType, id: &str, sandbox: &SandboxId) {
        if self.readers.0.is_empty() {
            return;
        }
        let Some(sandbox) = self.sandboxes.get(sandbox) else { return };
        let event = cri::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: what.into(),
            // The kubelet's own clock: it compares this with the time of its last list.
            created_at: clock::now(),
            pod_sandbox_status: Some(response::sandbox_status(&sandbox.meta(), sandbox.ready)),
            containers_statuses: sandbox
                .containers
                .iter()
                .filter_map(|id| self.containers.get(id))
                .map(Container::answer)
                .collect(),
        };
        self.readers.tell(&event.encode_to_vec().into());
    }

    /// Tells of a container what its new state means, given the one before.
    pub(super) fn announce_state(&mut self, before: cri::ContainerState, container: &Container) {
        use cri::ContainerState::{ContainerExited as Exited, ContainerRunning as Running};
        let after = container.state();
        // One whose start was not heard of before its end has started all the same; one that failed
        // to start has not.
        let has_started =
            after == Running || after == Exited && container.status.started_unix_nanos > 0;
        if !matches!(before, Running | Exited) && has_started {
            self.announce(
                ContainerEventType::ContainerStartedEvent,
                container.id.as_str(),
                &container.sandbox,
            );
        }
        if before != Exited && after == Exited {
            self.announce(
                ContainerEventType::ContainerStoppedEvent,
                container.id.as_str(),
                &container.sandbox,
            );
        }
    }
}
