//! Changes of what is kept of sandboxes and containers: decided under a lock, committed, then
//! published.

use kiyot_proto::{cri, store as records};

use super::{
    Verbs, failure,
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

    /// Keeps the annotations that a sandbox's pod has by now, from the config of a call that is for
    /// this pod. The next `ImageStatus` has nothing else of its pod.
    pub(super) async fn refresh_annotations(
        &self,
        sandbox: &Sandbox,
        config: Option<&cri::PodSandboxConfig>,
    ) {
        let is_of_pod = |config: &&cri::PodSandboxConfig| {
            config.metadata.as_ref().is_some_and(|metadata| *metadata.uid == *sandbox.uid)
        };
        let Some(config) = config.filter(is_of_pod) else { return };
        if config.annotations.is_empty() || sandbox.current_annotations() == config.annotations {
            return;
        }
        let _records = sandbox.records.lock().await;
        let Ok(sandbox) = self.view.sandbox(sandbox.id.as_str()) else { return };
        let mut meta = sandbox.meta();
        let is_as_first =
            meta.config.as_ref().is_some_and(|first| first.annotations == config.annotations);
        meta.current_annotations =
            if is_as_first { Default::default() } else { config.annotations.clone() };
        let mut batch = Batch::default();
        batch.put(Table::Sandboxes, sandbox.id.as_str(), &meta);
        if let Err(error) = self.parts.store.commit(batch).await {
            tracing::warn!(
                sandbox = %sandbox.id,
                error = failure::chain(&error),
                "annotations of a pod not recorded, a restart of the daemon forgets them"
            );
        }
        self.view.set_annotations(&sandbox.id, &meta);
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
        let mut batch = Batch::default();
        let ended: Vec<_> = self
            .view
            .containers_of(&sandbox.id)
            .into_iter()
            .filter_map(|container| {
                let status = self.with_reported(&container);
                transition::ended(&status, end, container.times()).map(|status| (container, status))
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
