//! Recovery at the start of the daemon: makes the records of the store consistent, and reads them
//! into the read model.

use std::collections::{HashMap, HashSet};

use kiyot_engine::{
    StoreError,
    id::{CellId, SandboxId},
};
use kiyot_proto::{cri, store as records};
use prost::Message;

use crate::backends::milpa::{
    clock,
    pods::{
        Pods,
        container_state::{self, Termination, Times},
    },
    store::{Batch, Store, Table},
};

/// Reads all records into the read model. Removes incomplete records: a part of a record whose
/// other part the store has set aside, and a container without a sandbox.
///
/// A container without a status reads CREATED until its cell reports more: if it read EXITED, its
/// next attempt would run beside it. The store sets a status aside, for example, after a rollback
/// from a later version.
///
/// Returns the `cgroup_parent` of each running sandbox.
pub(super) async fn recover(
    store: &Store,
    has_cell: impl Fn(&CellId) -> bool,
    pods: &Pods,
) -> Result<Vec<String>, StoreError> {
    let mut sandboxes: Vec<(String, records::SandboxMeta)> = store.load(Table::Sandboxes).await?;
    let mut statuses: HashMap<String, records::SandboxStatus> =
        store.load(Table::SandboxStatuses).await?.into_iter().collect();
    let mut containers: Vec<(String, records::ContainerMeta)> =
        store.load(Table::Containers).await?;
    // Records are read in the order of their random ids, but the read model has a pod's entries in
    // creation order. The creation times of a pod's entries are distinct.
    sandboxes.sort_by_key(|(_, meta)| meta.created_unix_nanos);
    containers.sort_by_key(|(_, meta)| meta.created_unix_nanos);
    let mut container_statuses: HashMap<String, records::ContainerStatus> =
        store.load(Table::ContainerStatuses).await?.into_iter().collect();

    let mut batch = Batch::default();
    let mut running: HashSet<SandboxId> = HashSet::new();
    let mut cgroup_parents = Vec::new();
    // Stopped sandboxes whose cells can still report the exits of their containers.
    let mut stopped_in_cells: HashSet<String> = HashSet::new();
    for (key, meta) in sandboxes {
        let ready = statuses.remove(&key).is_some_and(|status| status.ready);
        match pods.insert_sandbox(&meta, ready) {
            Ok(id) if ready => {
                running.insert(id);
                let linux = meta.config.and_then(|config| config.linux);
                cgroup_parents.extend(linux.map(|linux| linux.cgroup_parent));
            }
            Ok(_) => {
                if CellId::parse(&meta.cell).is_ok_and(|cell| has_cell(&cell)) {
                    stopped_in_cells.insert(key);
                }
            }
            Err(error) => {
                tracing::error!(sandbox = key, %error, "sandbox record with an invalid id removed");
                batch.remove(Table::Sandboxes, &key);
            }
        }
    }
    for (key, meta) in containers {
        let mut status = container_statuses.remove(&key).unwrap_or_default();
        let times = Times { created: meta.created_unix_nanos, now: clock::now() };
        if !running.contains(meta.sandbox.as_str())
            && !stopped_in_cells.contains(&meta.sandbox)
            && let Some(ended) =
                container_state::ended(&status, &Termination::sandbox_stopped(), times)
        {
            batch.put(Table::ContainerStatuses, &key, &ended);
            status = ended;
        }
        // Records of earlier versions have no reported status; the cell reports it again.
        let reported = cri::ContainerStatus::decode(std::mem::take(&mut status.told)).ok();
        match pods.restore_container(&meta, status, reported.as_ref()) {
            Ok(true) => {}
            Ok(false) | Err(_) => {
                tracing::warn!(
                    container = key,
                    sandbox = meta.sandbox,
                    "container record without a sandbox removed"
                );
                batch.remove(Table::Containers, &key).remove(Table::ContainerStatuses, &key);
            }
        }
    }
    for key in statuses.keys() {
        batch.remove(Table::SandboxStatuses, key);
    }
    for key in container_statuses.keys() {
        batch.remove(Table::ContainerStatuses, key);
    }
    store.commit(batch).await?;
    pods.expect_usage(running);
    Ok(cgroup_parents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_engine::id::ContainerId;

    /// Verifies X47.
    #[tokio::test]
    async fn sandboxes_and_containers_of_a_pod_are_in_the_order_of_their_creation() {
        const COUNT: i64 = 8;
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let mut batch = Batch::default();
        let metadata = cri::PodSandboxMetadata { uid: "uid".to_owned(), ..Default::default() };
        let config =
            cri::PodSandboxConfig { metadata: Some(metadata), ..cri::PodSandboxConfig::default() };
        let mut latest = String::new();
        for created_unix_nanos in 1..=COUNT {
            latest = SandboxId::mint().unwrap().to_string();
            let meta = records::SandboxMeta {
                id: latest.clone(),
                cell: CellId::mint().unwrap().to_string(),
                config: Some(config.clone()),
                created_unix_nanos,
                ..records::SandboxMeta::default()
            };
            batch.put(Table::Sandboxes, &latest, &meta);
        }
        for created_unix_nanos in 1..=COUNT {
            let id = ContainerId::mint().unwrap().to_string();
            let meta = records::ContainerMeta {
                id: id.clone(),
                sandbox: latest.clone(),
                created_unix_nanos,
                ..records::ContainerMeta::default()
            };
            batch.put(Table::Containers, &id, &meta);
        }
        store.commit(batch).await.unwrap();

        let pods = Pods::new();
        recover(&store, |_| false, &pods).await.unwrap();
        let sandboxes = pods.sandboxes_of_pod("uid");
        let created: Vec<_> = sandboxes.iter().map(|it| it.meta().created_unix_nanos).collect();
        assert_eq!(created, (1..=COUNT).collect::<Vec<_>>());
        let mut containers = pods.containers_of(&sandboxes.last().unwrap().id);
        containers.sort_by_key(|container| container.sequence);
        let created: Vec<_> = containers.iter().map(|it| it.meta().created_unix_nanos).collect();
        assert_eq!(created, (1..=COUNT).collect::<Vec<_>>());
    }
}
