//! What is kept in memory of a sandbox and of a container: encoded, because there may be thousands
//! and few are looked at.

use std::sync::Arc;

use bytes::Bytes;
use kiyot_proto::{cri, store};
use prost::Message;

use super::{
    annotation_index::Keys,
    container_state::{self, Times},
    response,
    samples::Samples,
    usage::Usage,
};
use crate::backends::milpa::{
    clock,
    id::{CellId, ContainerId, SandboxId},
};

/// A sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    /// Its id.
    pub(crate) id: SandboxId,
    /// The cell that it is.
    pub(crate) cell: CellId,
    /// The pod's `metadata.uid`.
    pub(crate) uid: Arc<str>,
    /// The pod, for messages: namespace/name.
    pub(crate) pod: Arc<str>,
    /// Whether it runs.
    pub(crate) ready: bool,
    /// When it came into the view, counted.
    pub(crate) since: u64,
    /// Its containers.
    pub(crate) containers: Vec<ContainerId>,
    /// Held by whoever changes the records of it or of one of its containers: read, decide, commit,
    /// publish.
    pub(crate) records: Arc<tokio::sync::Mutex<()>>,
    /// Held by whoever stops it.
    pub(crate) stopping: Arc<tokio::sync::Mutex<()>>,
    /// `store::SandboxMeta`.
    pub(super) meta: Bytes,
    /// Field 1 of a `ListPodSandboxResponse`.
    pub(super) item: Bytes,
    /// By the last heartbeat.
    pub(super) usage: Option<Usage>,
    /// By the last heartbeat too, while metrics are wanted.
    pub(super) samples: Option<Arc<Samples>>,
    /// By the last heartbeat too, in bytes; 0: not measured.
    pub(crate) ephemeral_storage: u64,
    /// The keys under which it is found by its pod's annotations.
    pub(super) annotations: Keys,
}

impl Sandbox {
    /// What is kept of it on disk.
    pub(crate) fn meta(&self) -> store::SandboxMeta {
        decoded(&self.meta)
    }

    /// What the kubelet sent to make it.
    pub(crate) fn config(&self) -> cri::PodSandboxConfig {
        self.meta().config.unwrap_or_default()
    }

    /// Its entry in a list.
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

/// A container.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    /// Its id.
    pub(crate) id: ContainerId,
    /// Its sandbox.
    pub(crate) sandbox: SandboxId,
    /// The cell that it is in.
    pub(crate) cell: CellId,
    /// Its id in the cell's containerd.
    pub(crate) cell_container: Arc<str>,
    /// When it came into the view, counted.
    pub(crate) since: u64,
    /// What is kept on disk of how it is, without `told`.
    pub(crate) status: Arc<store::ContainerStatus>,
    /// `store::ContainerMeta`.
    pub(super) meta: Bytes,
    /// Field 1 of a `ListContainersResponse`.
    pub(super) item: Bytes,
    /// By the last heartbeat.
    pub(super) usage: Option<Usage>,
    /// By the last heartbeat too, while metrics are wanted.
    pub(super) samples: Option<Arc<Samples>>,
    /// `cri::ContainerStatus`: what only the cell knows of it (resources, user, signal).
    pub(super) told: Bytes,
}

impl Container {
    /// What is kept of it on disk that never changes.
    pub(crate) fn meta(&self) -> store::ContainerMeta {
        decoded(&self.meta)
    }

    /// Its state.
    pub(crate) fn state(&self) -> cri::ContainerState {
        container_state::state(&self.status)
    }

    /// Returns what the node's clock says of it now.
    pub(crate) fn times(&self) -> Times {
        Times { created: self.meta().created_unix_nanos, now: clock::now() }
    }

    /// Whether it has exited.
    pub(crate) fn exited(&self) -> bool {
        self.state() == cri::ContainerState::ContainerExited
    }

    /// What is kept on disk when it is so: with what only the cell knows of it, which is not in
    /// [`Self::status`].
    pub(crate) fn record(&self, status: &store::ContainerStatus) -> store::ContainerStatus {
        store::ContainerStatus { told: self.told.clone(), ..status.clone() }
    }

    /// Its entry in a list.
    pub(crate) fn item(&self) -> cri::Container {
        decoded::<cri::ListContainersResponse>(&self.item).containers.pop().unwrap_or_default()
    }

    /// Its status, as the kubelet is answered it.
    pub(crate) fn answer(&self) -> cri::ContainerStatus {
        response::container_status(&self.meta(), &self.status, decoded(&self.told))
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

/// Decodes what this program has encoded itself: it can't fail, and an empty message would be
/// better than an end of all pods if it did.
pub(super) fn decoded<M: Message + Default>(encoded: &Bytes) -> M {
    M::decode(encoded.clone()).unwrap_or_default()
}
