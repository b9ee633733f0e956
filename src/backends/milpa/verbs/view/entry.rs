//! What is kept in memory of a sandbox and of a container: encoded, because there may be thousands
//! and few are looked at.

use std::sync::Arc;

use bytes::Bytes;
use kiyot_proto::{cri, store};
use prost::Message;

use super::{
    super::{
        clock, restored,
        transition::{self, Times},
    },
    annotations::Keys,
    kept_usage::Usage,
    samples::Samples,
};
use crate::backends::milpa::id::{CellId, ContainerId, SandboxId};

/// A sandbox.
#[derive(Debug, Clone)]
pub(in super::super) struct Sandbox {
    /// Its id.
    pub(in super::super) id: SandboxId,
    /// The cell that it is.
    pub(in super::super) cell: CellId,
    /// The pod's `metadata.uid`.
    pub(in super::super) uid: Arc<str>,
    /// The pod, for messages: namespace/name.
    pub(in super::super) pod: Arc<str>,
    /// Whether it runs.
    pub(in super::super) ready: bool,
    /// When it came into the view, counted.
    pub(in super::super) since: u64,
    /// Its containers.
    pub(in super::super) containers: Vec<ContainerId>,
    /// Held by whoever changes the records of it or of one of its containers: read, decide, commit,
    /// publish.
    pub(in super::super) records: Arc<tokio::sync::Mutex<()>>,
    /// Held by whoever stops it.
    pub(in super::super) stopping: Arc<tokio::sync::Mutex<()>>,
    /// `store::SandboxMeta`.
    pub(super) meta: Bytes,
    /// Field 1 of a `ListPodSandboxResponse`.
    pub(super) item: Bytes,
    /// By the last heartbeat.
    pub(super) usage: Option<Usage>,
    /// By the last heartbeat too, while metrics are wanted.
    pub(super) samples: Option<Arc<Samples>>,
    /// By the last heartbeat too, in bytes; 0: not measured.
    pub(in super::super) ephemeral_storage: u64,
    /// The keys under which it is found by its pod's annotations.
    pub(super) annotations: Keys,
}

impl Sandbox {
    /// What is kept of it on disk.
    pub(in super::super) fn meta(&self) -> store::SandboxMeta {
        decoded(&self.meta)
    }

    /// What the kubelet sent to make it.
    pub(in super::super) fn config(&self) -> cri::PodSandboxConfig {
        self.meta().config.unwrap_or_default()
    }

    /// Its entry in a list.
    pub(in super::super) fn item(&self) -> cri::PodSandbox {
        decoded::<cri::ListPodSandboxResponse>(&self.item).items.pop().unwrap_or_default()
    }

    pub(super) fn set_ready(&mut self, ready: bool) {
        self.ready = ready;
        self.item = Bytes::from(
            cri::ListPodSandboxResponse {
                items: vec![restored::sandbox_item(&self.meta(), ready)],
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
pub(in super::super) struct Container {
    /// Its id.
    pub(in super::super) id: ContainerId,
    /// Its sandbox.
    pub(in super::super) sandbox: SandboxId,
    /// The cell that it is in.
    pub(in super::super) cell: CellId,
    /// Its id in the cell's containerd.
    pub(in super::super) cell_container: Arc<str>,
    /// When it came into the view, counted.
    pub(in super::super) since: u64,
    /// What is kept on disk of how it is, without `told`.
    pub(in super::super) status: Arc<store::ContainerStatus>,
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
    pub(in super::super) fn meta(&self) -> store::ContainerMeta {
        decoded(&self.meta)
    }

    /// Its state.
    pub(in super::super) fn state(&self) -> cri::ContainerState {
        transition::state(&self.status)
    }

    /// Returns what the node's clock says of it now.
    pub(in super::super) fn times(&self) -> Times {
        Times { created: self.meta().created_unix_nanos, now: clock::now() }
    }

    /// Whether it has exited.
    pub(in super::super) fn exited(&self) -> bool {
        self.state() == cri::ContainerState::ContainerExited
    }

    /// What is kept on disk when it is so: with what only the cell knows of it, which is not in
    /// [`Self::status`].
    pub(in super::super) fn record(
        &self,
        status: &store::ContainerStatus,
    ) -> store::ContainerStatus {
        store::ContainerStatus { told: self.told.clone(), ..status.clone() }
    }

    /// Its entry in a list.
    pub(in super::super) fn item(&self) -> cri::Container {
        decoded::<cri::ListContainersResponse>(&self.item).containers.pop().unwrap_or_default()
    }

    /// Its status, as the kubelet is answered it.
    pub(in super::super) fn answer(&self) -> cri::ContainerStatus {
        restored::container_status(&self.meta(), &self.status, decoded(&self.told))
    }

    pub(super) fn set_status(&mut self, status: store::ContainerStatus) {
        self.status = Arc::new(status);
        self.item = Bytes::from(
            cri::ListContainersResponse {
                containers: vec![restored::container_item(&self.meta(), self.state())],
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
