//! Changes of what is kept of sandboxes and containers: decided under a lock, committed, then
//! published.

use kiyot_proto::store as records;

use super::{
    Verbs, clock,
    transition::{self, End},
    view::{Container, Sandbox},
};
use crate::backends::milpa::{
    id::{CellId, SandboxId},
    store::{Batch, StoreError, Table},
};

impl Verbs {
    /// Changes how a container is. Of what is unknown by now nothing is changed.
    pub(super) async fn change_container(
        &self,
        container: &Container,
        decide: impl FnOnce(&records::ContainerStatus) -> Option<records::ContainerStatus> + Send,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.view.sandbox(container.sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let Ok(current) = self.view.container(container.id.as_str()) else { return Ok(()) };
        let Some(next) = decide(&current.status) else { return Ok(()) };
        let mut batch = Batch::default();
        batch.put(Table::ContainerStatuses, current.id.as_str(), &current.record(&next));
        self.parts.store.commit(batch).await?;
        self.view.set_status(&current.id, next);
        Ok(())
    }

    /// Says that a sandbox does not run any more; its containers are left as they are.
    pub(super) async fn not_ready(
        &self,
        sandbox: &SandboxId,
        reason: &str,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.view.sandbox(sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        if !self.view.sandbox(sandbox.id.as_str()).is_ok_and(|sandbox| sandbox.ready) {
            return Ok(());
        }
        let mut batch = Batch::default();
        batch.put(Table::SandboxStatuses, sandbox.id.as_str(), &stopped(reason));
        self.parts.store.commit(batch).await?;
        self.view.set_ready(&sandbox.id, false);
        Ok(())
    }

    /// Says that a sandbox does not run any more, and that those of its containers that had not
    /// exited ended with it.
    pub(super) async fn end_sandbox(
        &self,
        sandbox: &SandboxId,
        end: &End,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.view.sandbox(sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let Ok(sandbox) = self.view.sandbox(sandbox.id.as_str()) else { return Ok(()) };
        let now = clock::now();
        let mut batch = Batch::default();
        let ended: Vec<_> = self
            .view
            .containers_of(&sandbox.id)
            .into_iter()
            .filter_map(|container| {
                transition::ended(&container.status, end, now).map(|status| (container, status))
            })
            .collect();
        for (container, status) in &ended {
            batch.put(Table::ContainerStatuses, container.id.as_str(), &container.record(status));
        }
        if sandbox.ready {
            batch.put(Table::SandboxStatuses, sandbox.id.as_str(), &stopped(&end.message));
        }
        self.parts.store.commit(batch).await?;
        for (container, status) in ended {
            self.view.set_status(&container.id, status);
        }
        if sandbox.ready {
            self.view.set_ready(&sandbox.id, false);
        }
        Ok(())
    }

    /// Drops the records of a container.
    pub(super) async fn drop_container(&self, container: &Container) -> Result<(), StoreError> {
        let id = &container.id;
        // Without a sandbox it has gone with that.
        let Ok(sandbox) = self.view.sandbox(container.sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let mut batch = Batch::default();
        batch.remove(Table::Containers, id.as_str()).remove(Table::ContainerStatuses, id.as_str());
        self.parts.store.commit(batch).await?;
        self.view.remove_container(id);
        Ok(())
    }

    /// Drops the records of a sandbox and of its containers.
    pub(super) async fn drop_sandbox(&self, sandbox: &Sandbox) -> Result<(), StoreError> {
        let _records = sandbox.records.lock().await;
        let mut batch = Batch::default();
        batch
            .remove(Table::Sandboxes, sandbox.id.as_str())
            .remove(Table::SandboxStatuses, sandbox.id.as_str());
        for container in self.view.containers_of(&sandbox.id) {
            batch
                .remove(Table::Containers, container.id.as_str())
                .remove(Table::ContainerStatuses, container.id.as_str());
        }
        // The reasons of their ends were for their pods' sandboxes.
        let keep = |cell: &CellId| *cell != sandbox.cell && self.view.has_cell(cell);
        self.parts.cells.forget_gone(keep, &mut batch);
        self.parts.store.commit(batch).await?;
        self.view.remove_sandbox(&sandbox.id);
        // A newer sandbox of the same pod goes on with them.
        if self.view.sandboxes_of_pod(&sandbox.uid).is_empty() {
            self.parts.images.forget_pod(&sandbox.uid);
        }
        Ok(())
    }
}

fn stopped(reason: &str) -> records::SandboxStatus {
    records::SandboxStatus { ready: false, reason: reason.to_owned() }
}
