//! What is known after a start: the records of the store, made consistent.

use std::collections::{HashMap, HashSet};

use kiyot_proto::{cri, store as records};
use prost::Message;

use super::{
    Verbs, clock,
    transition::{self, End, Times},
};
use crate::backends::milpa::{
    id::{CellId, SandboxId},
    store::{Batch, StoreError, Table},
};

impl Verbs {
    /// Reads all records into the view. What can't be shown any more is dropped: parts of a record
    /// whose other part was set aside, containers without a sandbox.
    ///
    /// A container whose state was set aside, as that of a later version after a rollback, is as it
    /// was made until its cell says more: said to have ended, its next attempt would run beside it.
    pub(super) async fn restore(&self) -> Result<(), StoreError> {
        let store = &self.parts.store;
        let sandboxes: Vec<(String, records::SandboxMeta)> = store.load(Table::Sandboxes).await?;
        let mut statuses: HashMap<String, records::SandboxStatus> =
            store.load(Table::SandboxStatuses).await?.into_iter().collect();
        let containers: Vec<(String, records::ContainerMeta)> =
            store.load(Table::Containers).await?;
        let mut container_statuses: HashMap<String, records::ContainerStatus> =
            store.load(Table::ContainerStatuses).await?.into_iter().collect();

        let mut batch = Batch::default();
        let mut running: HashSet<SandboxId> = HashSet::new();
        // The cells of these can still say how their containers ended.
        let mut stopped_in_cells: HashSet<String> = HashSet::new();
        for (key, meta) in sandboxes {
            let ready = statuses.remove(&key).is_some_and(|status| status.ready);
            match self.view.insert_sandbox(&meta, ready) {
                Ok(id) if ready => drop(running.insert(id)),
                Ok(_) => {
                    let cell = CellId::parse(&meta.cell).ok();
                    if cell.is_some_and(|cell| self.parts.cells.get(&cell).is_some()) {
                        stopped_in_cells.insert(key);
                    }
                }
                Err(error) => {
                    tracing::error!(sandbox = key, %error, "The record of a sandbox names what is no id, and is dropped");
                    batch.remove(Table::Sandboxes, &key);
                }
            }
        }
        for (key, meta) in containers {
            let mut status = container_statuses.remove(&key).unwrap_or_default();
            let times = Times { created: meta.created_unix_nanos, now: clock::now() };
            if !running.contains(meta.sandbox.as_str())
                && !stopped_in_cells.contains(&meta.sandbox)
                && let Some(ended) = transition::ended(&status, &End::sandbox_stopped(), times)
            {
                batch.put(Table::ContainerStatuses, &key, &ended);
                status = ended;
            }
            // What was told of before this was kept is told again.
            let told = cri::ContainerStatus::decode(std::mem::take(&mut status.told)).ok();
            match self.view.restore_container(&meta, status, told.as_ref()) {
                Ok(true) => {}
                Ok(false) | Err(_) => {
                    tracing::warn!(
                        container = key,
                        sandbox = meta.sandbox,
                        "The record of a container has no sandbox, and is dropped"
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
        self.view.expect_usage(running);
        self.restore_features().await
    }

    /// Why a cell ended that is there no more.
    pub(super) fn reason_of(&self, cell: &CellId) -> String {
        self.parts
            .cells
            .gone_reason(cell)
            .unwrap_or_else(|| "nothing is known of it any more".to_owned())
    }
}
