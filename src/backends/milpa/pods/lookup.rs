//! Finding a sandbox or a container: by its id or a unique prefix, by its pod, by its cell.

use std::{borrow::Borrow, collections::BTreeMap, ops::Bound, time::Duration};

use kiyot_proto::cri;
use tonic::{Code, Status};

use super::{Cache, Container, Pods, Sandbox, unknown};
use crate::backends::milpa::id::{CellId, ContainerId, SandboxId};

impl Pods {
    /// The sandbox of an id or a unique prefix of one. `NOT_FOUND`, in the words of containerd,
    /// without one.
    pub(crate) fn sandbox(&self, id: &str) -> Result<Sandbox, Status> {
        by_prefix(&self.read().sandboxes, id, "sandbox").cloned()
    }

    /// The container of an id or a unique prefix of one. `NOT_FOUND`, in the words of containerd,
    /// without one.
    pub(crate) fn container(&self, id: &str) -> Result<Container, Status> {
        by_prefix(&self.read().containers, id, "container").cloned()
    }

    /// All containers of a sandbox.
    pub(crate) fn containers_of(&self, sandbox: &SandboxId) -> Vec<Container> {
        let cache = self.read();
        let ids = cache
            .sandboxes
            .get(sandbox)
            .map(|sandbox| sandbox.containers.as_slice())
            .unwrap_or_default();
        ids.iter().filter_map(|id| cache.containers.get(id)).cloned().collect()
    }

    /// The sandbox of a cell.
    pub(crate) fn sandbox_of_cell(&self, cell: &CellId) -> Option<Sandbox> {
        let cache = self.read();
        cache.by_cell.get(cell).and_then(|id| cache.sandboxes.get(id)).cloned()
    }

    /// The container that a cell knows by this id, the first of several; never one of another cell,
    /// whatever ids that gives its own.
    pub(crate) fn container_of_cell(&self, cell: &CellId, id: &str) -> Option<Container> {
        self.read().in_cell(cell, id).cloned()
    }

    /// The sandboxes of a pod, by its uid, in the order in which they were made.
    pub(crate) fn sandboxes_of_pod(&self, uid: &str) -> Vec<Sandbox> {
        let cache = self.read();
        let ids = cache.by_uid.get(uid).map(Vec::as_slice).unwrap_or_default();
        ids.iter().filter_map(|id| cache.sandboxes.get(id)).cloned().collect()
    }

    /// When the latest of a pod's sandboxes and containers was created; 0 if there is none.
    pub(crate) fn latest_of_pod(&self, uid: &str) -> i64 {
        let cache = self.read();
        let sandboxes =
            cache.by_uid.get(uid).into_iter().flatten().filter_map(|id| cache.sandboxes.get(id));
        let containers = |sandbox: &Sandbox| {
            sandbox
                .containers
                .iter()
                .filter_map(|id| cache.containers.get(id))
                .map(|container| container.meta().created_unix_nanos)
                .max()
        };
        sandboxes
            .map(|sandbox| containers(sandbox).unwrap_or(0).max(sandbox.meta().created_unix_nanos))
            .max()
            .unwrap_or(0)
    }

    /// The container of a sandbox with this name and attempt.
    pub(crate) fn container_named(
        &self,
        sandbox: &SandboxId,
        metadata: &cri::ContainerMetadata,
    ) -> Option<Container> {
        self.containers_of(sandbox)
            .into_iter()
            .find(|container| container.item().metadata.as_ref() == Some(metadata))
    }

    /// Waits until a container has exited or is removed. Returns whether that was in time.
    pub(crate) async fn wait_for_exit(&self, id: &ContainerId, timeout: Duration) -> bool {
        let exited = self.wait(timeout, |pods| {
            pods.container(id.as_str()).map_or(true, |now| now.exited()).then_some(())
        });
        exited.await.is_some()
    }

    /// All sandboxes.
    pub(crate) fn all_sandboxes(&self) -> Vec<Sandbox> {
        self.read().sandboxes.values().cloned().collect()
    }
}

impl Cache {
    /// The full id for a filter: as given, or that which it is the unique prefix of.
    pub(super) fn full_sandbox_id<'a>(&'a self, id: &'a str) -> &'a str {
        by_prefix(&self.sandboxes, id, "").map_or(id, |sandbox| sandbox.id.as_str())
    }

    /// The same of a container's id.
    pub(super) fn full_container_id<'a>(&'a self, id: &'a str) -> &'a str {
        by_prefix(&self.containers, id, "").map_or(id, |container| container.id.as_str())
    }
}

fn by_prefix<'a, K: Ord + Borrow<str>, V>(
    all: &'a BTreeMap<K, V>,
    id: &str,
    what: &str,
) -> Result<&'a V, Status> {
    let mut matching = all
        .range::<str, _>((Bound::Included(id), Bound::Unbounded))
        .take_while(|(key, _)| (*key).borrow().starts_with(id));
    match (id.is_empty(), matching.next(), matching.next()) {
        (true, ..) | (_, None, _) => Err(unknown(what, id)),
        (_, Some((_, value)), None) => Ok(value),
        (_, Some((key, value)), Some(_)) if key.borrow() == id => Ok(value),
        _ => Err(Status::new(
            Code::Unknown,
            format!(
                "an error occurred when try to find {what} {id:?}: multiple IDs found with provided prefix: {id}"
            ),
        )),
    }
}
