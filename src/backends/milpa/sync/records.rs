//! Changes of the records of sandboxes and containers: decided under a lock, committed, then
//! published in the read model.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kiyot_engine::{
    StoreError,
    id::{CellId, ContainerId, SandboxId},
};
use kiyot_proto::{cri, store as records};
use kiyot_values::error_chain::error_chain;

use crate::backends::milpa::{
    cells::Cells,
    images::Images,
    pods::{
        Container, Pods, Sandbox,
        container_state::{self, Termination},
    },
    store::{Batch, Store, Table},
};

/// Changes records and publishes them.
#[derive(Debug)]
pub(crate) struct Records {
    store: Store,
    cells: Arc<Cells>,
    images: Arc<Images>,
    pub(super) pods: Arc<Pods>,
    /// Containers whose exit is being recorded, with the exit that the cell has reported.
    exits: Mutex<HashMap<ContainerId, Option<records::ReportedExit>>>,
}

impl Records {
    pub(super) fn new(
        store: &Store,
        cells: &Arc<Cells>,
        images: &Arc<Images>,
        pods: &Arc<Pods>,
    ) -> Self {
        Self {
            store: store.clone(),
            cells: Arc::clone(cells),
            images: Arc::clone(images),
            pods: Arc::clone(pods),
            exits: Mutex::default(),
        }
    }

    fn exits(&self) -> MutexGuard<'_, HashMap<ContainerId, Option<records::ReportedExit>>> {
        self.exits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a container's exit as being recorded. Returns whether it was not marked before.
    pub(super) fn begin_exit(
        &self,
        id: &ContainerId,
        reported: Option<records::ReportedExit>,
    ) -> bool {
        let mut exits = self.exits();
        if exits.contains_key(id) {
            return false;
        }
        exits.insert(id.clone(), reported);
        true
    }

    /// Removes the mark of a container whose exit is recorded.
    pub(super) fn finish_exit(&self, id: &ContainerId) {
        self.exits().remove(id);
    }

    /// Returns a container's status, with the exit that its cell has reported if it is not recorded
    /// yet.
    fn with_reported_exit(&self, container: &Container) -> records::ContainerStatus {
        let exits = self.exits();
        let exit = exits.get(&container.id).and_then(Option::as_ref);
        exit.and_then(|exit| container_state::reported(&container.status, exit))
            .unwrap_or_else(|| records::ContainerStatus::clone(&container.status))
    }

    /// Sets the position in the cell's log at which the node's file begins.
    pub(crate) async fn set_log_base(
        &self,
        container: &Container,
        log_base: i64,
    ) -> Result<(), StoreError> {
        self.change_container(container, |current| {
            Some(records::ContainerStatus { log_base, ..current.clone() })
        })
        .await
    }

    /// Changes the status of a container. Does nothing if the container is removed.
    pub(crate) async fn change_container(
        &self,
        container: &Container,
        decide: impl FnOnce(&records::ContainerStatus) -> Option<records::ContainerStatus> + Send,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.pods.sandbox(container.sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let Ok(current) = self.pods.container(container.id.as_str()) else { return Ok(()) };
        let Some(next) = decide(&current.status) else { return Ok(()) };
        let mut batch = Batch::default();
        batch.put(Table::ContainerStatuses, current.id.as_str(), &current.record(&next));
        self.store.commit(batch).await?;
        self.pods.set_status(&current.id, next);
        Ok(())
    }

    /// Records the current annotations of a sandbox's pod, from the config of a call for this pod.
    /// The next `ImageStatus` identifies its pod only by them.
    pub(crate) async fn refresh_annotations(
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
        let Ok(sandbox) = self.pods.sandbox(sandbox.id.as_str()) else { return };
        let mut meta = sandbox.meta();
        let is_as_first =
            meta.config.as_ref().is_some_and(|first| first.annotations == config.annotations);
        meta.current_annotations =
            if is_as_first { Default::default() } else { config.annotations.clone() };
        let mut batch = Batch::default();
        batch.put(Table::Sandboxes, sandbox.id.as_str(), &meta);
        if let Err(error) = self.store.commit(batch).await {
            tracing::warn!(
                sandbox = %sandbox.id,
                error = error_chain(&error),
                "annotations of a pod not recorded, a restart of the daemon loses them"
            );
        }
        self.pods.set_meta(&sandbox.id, &meta);
    }

    /// Records the files of a sandbox's volumes that have another content in the cell. Returns the
    /// recorded files: the files of the first call stay until the sandbox ends.
    pub(crate) async fn set_replaced_files(
        &self,
        sandbox: &Sandbox,
        files: Vec<records::ReplacedFile>,
    ) -> Result<Vec<records::ReplacedFile>, StoreError> {
        let _records = sandbox.records.lock().await;
        let Ok(sandbox) = self.pods.sandbox(sandbox.id.as_str()) else { return Ok(files) };
        let mut meta = sandbox.meta();
        if meta.replaced_files.is_empty() {
            meta.replaced_files = files;
            let mut batch = Batch::default();
            batch.put(Table::Sandboxes, sandbox.id.as_str(), &meta);
            self.store.commit(batch).await?;
            self.pods.set_meta(&sandbox.id, &meta);
        }
        Ok(meta.replaced_files)
    }

    /// Records that a sandbox has stopped. Its containers keep their states.
    pub(crate) async fn set_not_ready(
        &self,
        sandbox: &SandboxId,
        reason: &str,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.pods.sandbox(sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        if !self.pods.sandbox(sandbox.id.as_str()).is_ok_and(|sandbox| sandbox.ready) {
            return Ok(());
        }
        let mut batch = Batch::default();
        batch.put(Table::SandboxStatuses, sandbox.id.as_str(), &stopped(reason));
        self.store.commit(batch).await?;
        self.pods.set_ready(&sandbox.id, false);
        Ok(())
    }

    /// Records that a sandbox has stopped, and that its containers ended with it unless they had
    /// exited.
    pub(crate) async fn end_sandbox(
        &self,
        sandbox: &SandboxId,
        termination: &Termination,
    ) -> Result<(), StoreError> {
        let Ok(sandbox) = self.pods.sandbox(sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let Ok(sandbox) = self.pods.sandbox(sandbox.id.as_str()) else { return Ok(()) };
        let mut batch = Batch::default();
        let ended: Vec<_> = self
            .pods
            .containers_of(&sandbox.id)
            .into_iter()
            .filter_map(|container| {
                let status = self.with_reported_exit(&container);
                container_state::ended(&status, termination, container.times())
                    .map(|status| (container, status))
            })
            .collect();
        for (container, status) in &ended {
            batch.put(Table::ContainerStatuses, container.id.as_str(), &container.record(status));
        }
        if sandbox.ready {
            batch.put(Table::SandboxStatuses, sandbox.id.as_str(), &stopped(&termination.message));
        }
        self.store.commit(batch).await?;
        for (container, status) in ended {
            self.pods.set_status(&container.id, status);
        }
        if sandbox.ready {
            self.pods.set_ready(&sandbox.id, false);
        }
        Ok(())
    }

    pub(crate) async fn remove_container(&self, container: &Container) -> Result<(), StoreError> {
        let id = &container.id;
        // Without a sandbox, the container was removed together with its sandbox.
        let Ok(sandbox) = self.pods.sandbox(container.sandbox.as_str()) else { return Ok(()) };
        let _records = sandbox.records.lock().await;
        let mut batch = Batch::default();
        batch.remove(Table::Containers, id.as_str()).remove(Table::ContainerStatuses, id.as_str());
        self.store.commit(batch).await?;
        self.pods.remove_container(id);
        Ok(())
    }

    /// Removes the records of a sandbox and of its containers.
    pub(crate) async fn remove_sandbox(&self, sandbox: &Sandbox) -> Result<(), StoreError> {
        let _records = sandbox.records.lock().await;
        let mut batch = Batch::default();
        batch
            .remove(Table::Sandboxes, sandbox.id.as_str())
            .remove(Table::SandboxStatuses, sandbox.id.as_str());
        for container in self.pods.containers_of(&sandbox.id) {
            batch
                .remove(Table::Containers, container.id.as_str())
                .remove(Table::ContainerStatuses, container.id.as_str());
        }
        // The reasons of ended cells are kept for the sandboxes of their pods.
        let keep = |cell: &CellId| *cell != sandbox.cell && self.pods.has_cell(cell);
        self.cells.forget_gone(keep, &mut batch);
        self.store.commit(batch).await?;
        self.pods.remove_sandbox(&sandbox.id);
        // A newer sandbox of the same pod uses its images.
        if self.pods.sandboxes_of_pod(&sandbox.uid).is_empty() {
            self.images.forget_pod(&sandbox.uid);
        }
        Ok(())
    }
}

fn stopped(reason: &str) -> records::SandboxStatus {
    records::SandboxStatus { ready: false, reason: reason.to_owned() }
}
