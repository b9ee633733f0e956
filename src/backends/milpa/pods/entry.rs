//! Entries of sandboxes and containers. They are encoded, because there may be thousands and few
//! are read.

use std::sync::Arc;

use bytes::Bytes;
use kiyot_engine::id::{CellId, ContainerId, SandboxId};
use kiyot_proto::{cri, store};
use prost::Message;

use super::{
    annotation_index::Keys,
    container_state::{self, Times},
    response,
    samples::Samples,
    usage::Usage,
};
use crate::backends::milpa::clock;

#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub(crate) id: SandboxId,
    pub(crate) cell: CellId,
    /// The pod's `metadata.uid`.
    pub(crate) uid: Arc<str>,
    /// The pod in messages: namespace/name.
    pub(crate) pod: Arc<str>,
    pub(crate) ready: bool,
    pub(crate) containers: Vec<ContainerId>,
    /// Held during a change of its records or its containers' records: read, decide, commit,
    /// publish.
    pub(crate) records: Arc<tokio::sync::Mutex<()>>,
    /// Held during its stop.
    pub(crate) stopping: Arc<tokio::sync::Mutex<()>>,
    /// Encoded `store::SandboxMeta`.
    pub(super) meta: Bytes,
    /// Field 1 of a `ListPodSandboxResponse`.
    pub(super) item: Bytes,
    /// Usage by the last heartbeat.
    pub(super) usage: Option<Usage>,
    /// Metrics by the last heartbeat, while they are scraped.
    pub(super) samples: Option<Arc<Samples>>,
    /// Bytes by the last heartbeat; 0 if not measured.
    pub(crate) ephemeral_storage: u64,
    /// Its keys in the annotation index.
    pub(super) annotations: Keys,
}

impl Sandbox {
    /// Decodes its record.
    pub(crate) fn meta(&self) -> store::SandboxMeta {
        decoded(&self.meta)
    }

    /// Decodes its list entry.
    pub(crate) fn item(&self) -> cri::PodSandbox {
        decoded::<cri::ListPodSandboxResponse>(&self.item).items.pop().unwrap_or_default()
    }

    pub(super) fn set_ready(&mut self, ready: bool) {
        self.ready = ready;
        self.item = Bytes::from(
            cri::ListPodSandboxResponse {
                items: vec![response::sandbox_item(&self.meta(), ready)],
            }
            .encode_to_vec(),
        );
        if !ready {
            (self.usage, self.samples) = (None, None);
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub(crate) id: ContainerId,
    pub(crate) sandbox: SandboxId,
    /// The cell of its sandbox.
    pub(crate) cell: CellId,
    /// Its id in the cell's containerd.
    pub(crate) cell_container: Arc<str>,
    /// Sequence number of its insertion.
    pub(crate) sequence: u64,
    /// Recorded status, without `reported`.
    pub(crate) status: Arc<store::ContainerStatus>,
    /// Encoded `store::ContainerMeta`.
    pub(super) meta: Bytes,
    /// Field 1 of a `ListContainersResponse`.
    pub(super) item: Bytes,
    /// Usage by the last heartbeat.
    pub(super) usage: Option<Usage>,
    /// Metrics by the last heartbeat, while they are scraped.
    pub(super) samples: Option<Arc<Samples>>,
    /// Encoded `cri::ContainerStatus` with the details that only the cell knows: resources, user
    /// and stop signal.
    pub(super) reported: Bytes,
}

impl Container {
    /// Decodes its constant record.
    pub(crate) fn meta(&self) -> store::ContainerMeta {
        decoded(&self.meta)
    }

    pub(crate) fn state(&self) -> cri::ContainerState {
        container_state::state(&self.status)
    }

    /// Returns its times by the node's clock, for a report that is received now.
    pub(crate) fn times(&self) -> Times {
        Times { created: self.meta().created_unix_nanos, now: clock::now() }
    }

    pub(crate) fn exited(&self) -> bool {
        self.state() == cri::ContainerState::ContainerExited
    }

    /// Returns the record of a status, with the reported details.
    pub(crate) fn record(&self, status: &store::ContainerStatus) -> store::ContainerStatus {
        store::ContainerStatus { told: self.reported.clone(), ..status.clone() }
    }

    /// Decodes its list entry.
    pub(crate) fn item(&self) -> cri::Container {
        decoded::<cri::ListContainersResponse>(&self.item).containers.pop().unwrap_or_default()
    }

    /// Returns its status as the kubelet reads it.
    pub(crate) fn answer(&self) -> cri::ContainerStatus {
        response::container_status(&self.meta(), &self.status, decoded(&self.reported))
    }

    pub(super) fn set_status(&mut self, status: store::ContainerStatus) {
        self.status = Arc::new(status);
        self.item = Bytes::from(
            cri::ListContainersResponse {
                containers: vec![response::container_item(&self.meta(), self.state())],
            }
            .encode_to_vec(),
        );
        if self.state() != cri::ContainerState::ContainerRunning {
            (self.usage, self.samples) = (None, None);
        }
    }
}

/// Decodes a message that the daemon has encoded itself. Decoding can't fail, but an empty message
/// would be better than a panic.
pub(super) fn decoded<M: Message + Default>(encoded: &Bytes) -> M {
    M::decode(encoded.clone()).unwrap_or_default()
}
