//! Lookup of sandboxes and containers: by id or unique prefix, by pod, and by cell.

use std::{borrow::Borrow, collections::BTreeMap, ops::Bound, sync::Arc, time::Duration};

use kiyot_engine::id::{CellId, ContainerId, SandboxId};
use kiyot_proto::cri;

use super::{Cache, Container, Pods, Sandbox};

/// An error of a lookup, in the words of containerd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LookupError {
    #[error("an error occurred when try to find {kind} {id:?}: not found")]
    NotFound {
        /// Sandbox or container.
        kind: &'static str,
        /// The id of the request.
        id: String,
    },
    /// The id is a prefix of several ids.
    #[error(
        "an error occurred when try to find {kind} {id:?}: \
         multiple IDs found with provided prefix: {id}"
    )]
    Ambiguous {
        /// Sandbox or container.
        kind: &'static str,
        /// The id of the request.
        id: String,
    },
}

impl Pods {
    /// Finds a sandbox by its id or a unique prefix.
    pub(crate) fn sandbox(&self, id: &str) -> Result<Sandbox, LookupError> {
        by_prefix(&self.read().sandboxes, id, "sandbox").cloned()
    }

    /// Finds a container by its id or a unique prefix.
    pub(crate) fn container(&self, id: &str) -> Result<Container, LookupError> {
        by_prefix(&self.read().containers, id, "container").cloned()
    }

    pub(crate) fn containers_of(&self, sandbox: &SandboxId) -> Vec<Container> {
        let cache = self.read();
        let ids = cache
            .sandboxes
            .get(sandbox)
            .map(|sandbox| sandbox.containers.as_slice())
            .unwrap_or_default();
        ids.iter().filter_map(|id| cache.containers.get(id)).cloned().collect()
    }

    pub(crate) fn sandbox_of_cell(&self, cell: &CellId) -> Option<Sandbox> {
        let cache = self.read();
        cache.by_cell.get(cell).and_then(|id| cache.sandboxes.get(id)).cloned()
    }

    /// Finds a container by its id in its cell, the first if several match. Never returns a
    /// container of another cell.
    pub(crate) fn container_of_cell(&self, cell: &CellId, id: &str) -> Option<Container> {
        self.read().in_cell(cell, id).cloned()
    }

    /// Returns the sandboxes of a pod, by its uid, in creation order.
    pub(crate) fn sandboxes_of_pod(&self, uid: &str) -> Vec<Sandbox> {
        let cache = self.read();
        let ids = cache.by_uid.get(uid).map(Vec::as_slice).unwrap_or_default();
        ids.iter().filter_map(|id| cache.sandboxes.get(id)).cloned().collect()
    }

    /// Returns the latest creation time of a pod's sandboxes and containers; 0 without them.
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

    /// Finds the container of a sandbox with this name and attempt.
    pub(crate) fn container_named(
        &self,
        sandbox: &SandboxId,
        metadata: &cri::ContainerMetadata,
    ) -> Option<Container> {
        self.containers_of(sandbox)
            .into_iter()
            .find(|container| container.item().metadata.as_ref() == Some(metadata))
    }

    /// Waits until a container has exited or is removed. Returns whether it did in time.
    pub(crate) async fn wait_for_exit(&self, id: &ContainerId, timeout: Duration) -> bool {
        let exited = self.wait(timeout, |pods| {
            pods.container(id.as_str()).map_or(true, |now| now.exited()).then_some(())
        });
        exited.await.is_some()
    }

    /// Returns the latest sandbox of each pod, with namespace/name, uid and creation time.
    pub(crate) fn latest_sandboxes(&self) -> Vec<(SandboxId, Arc<str>, Arc<str>, i64)> {
        let cache = self.read();
        let latest = |ids: &Vec<SandboxId>| {
            let sandboxes = ids.iter().filter_map(|id| cache.sandboxes.get(id));
            let created = |sandbox: &&Sandbox| sandbox.item().created_at;
            let latest = sandboxes.max_by_key(created)?;
            let (pod, uid) = (Arc::clone(&latest.pod), Arc::clone(&latest.uid));
            Some((latest.id.clone(), pod, uid, created(&latest)))
        };
        cache.by_uid.values().filter_map(latest).collect()
    }

    pub(crate) fn all_sandboxes(&self) -> Vec<Sandbox> {
        self.read().sandboxes.values().cloned().collect()
    }
}

impl Cache {
    /// Completes a unique prefix of a sandbox id in a filter.
    pub(super) fn full_sandbox_id<'a>(&'a self, id: &'a str) -> &'a str {
        by_prefix(&self.sandboxes, id, "").map_or(id, |sandbox| sandbox.id.as_str())
    }

    /// Completes a unique prefix of a container id in a filter.
    pub(super) fn full_container_id<'a>(&'a self, id: &'a str) -> &'a str {
        by_prefix(&self.containers, id, "").map_or(id, |container| container.id.as_str())
    }
}

fn by_prefix<'a, K: Ord + Borrow<str>, V>(
    all: &'a BTreeMap<K, V>,
    id: &str,
    kind: &'static str,
) -> Result<&'a V, LookupError> {
    let mut matching = all
        .range::<str, _>((Bound::Included(id), Bound::Unbounded))
        .take_while(|(key, _)| (*key).borrow().starts_with(id));
    match (id.is_empty(), matching.next(), matching.next()) {
        (true, ..) | (_, None, _) => Err(LookupError::NotFound { kind, id: id.to_owned() }),
        (_, Some((_, value)), None) => Ok(value),
        (_, Some((key, value)), Some(_)) if key.borrow() == id => Ok(value),
        _ => Err(LookupError::Ambiguous { kind, id: id.to_owned() }),
    }
}
