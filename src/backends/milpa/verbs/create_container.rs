//! `CreateContainer`: volumes and image are brought into the cell first.

use std::{sync::Arc, time::Instant};

use kiyot_proto::{
    cell::{FileChange, MakeDir, Root, file_change::Change},
    cri, store as records,
};
use tonic::{Code, Status};

use super::{Verbs, calls, clock, failure, flight::Boarded, policy, rewrite, view, view::Sandbox};
use crate::backends::milpa::{
    cells::Cell,
    id::ContainerId,
    logs::Logs,
    store::{Batch, Table},
    volumes::support,
};

/// Mode of the directory of a container's log in the cell.
const LOG_DIR_MODE: u32 = 0o755;

impl Verbs {
    /// Answers with the container of this name and attempt: the one that is being made, the one
    /// whose answer was lost, or a new one. The work goes on without its caller.
    pub(super) async fn create_container(
        self: &Arc<Self>,
        request: cri::CreateContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::CreateContainerResponse, Status> {
        let sandbox = self.view.sandbox(&request.pod_sandbox_id)?;
        self.claim(&sandbox.id);
        let config = request
            .config
            .as_ref()
            .ok_or_else(|| Status::invalid_argument("CreateContainer without a config"))?;
        let metadata = config
            .metadata
            .clone()
            .ok_or_else(|| Status::invalid_argument("CreateContainer without a config.metadata"))?;
        if let Some(refusal) = self.move_to_node(&sandbox, config, deadline).await {
            return Err(refusal);
        }
        policy::check_container(&self.rules(), config)?;
        self.refresh_annotations(&sandbox, request.sandbox_config.as_ref()).await;
        let key = (sandbox.id.clone(), metadata.name.clone());
        loop {
            let (verbs, sandbox, metadata) =
                (Arc::clone(self), sandbox.id.clone(), metadata.clone());
            let boarded = self.creations.board(
                &self.tasks,
                &self.stop,
                key.clone(),
                request.clone(),
                same,
                |request| {
                    Box::pin(async move {
                        verbs.made_or_make(sandbox.as_str(), &metadata, &request).await
                    })
                },
            );
            match boarded {
                Boarded::Seat(seat) => {
                    let id = seat.wait(deadline, "CreateContainer").await?;
                    return Ok(cri::CreateContainerResponse {
                        container_id: id.as_str().to_owned(),
                    });
                }
                Boarded::Other(seat) => match seat
                    .wait(deadline, "CreateContainer with another config")
                    .await
                {
                    Err(status) if status.code() == Code::DeadlineExceeded => return Err(status),
                    Ok(_) | Err(_) => {}
                },
            }
        }
    }

    async fn made_or_make(
        self: Arc<Self>,
        sandbox: &str,
        metadata: &cri::ContainerMetadata,
        request: &cri::CreateContainerRequest,
    ) -> Result<ContainerId, Status> {
        let sandbox = self.view.sandbox(sandbox)?;
        if !sandbox.ready {
            return Err(Status::failed_precondition(format!(
                "sandbox container {:?} is not running",
                sandbox.id.as_str()
            )));
        }
        if let Some(existing) = self.view.container_named(&sandbox.id, metadata) {
            if existing.state() != cri::ContainerState::ContainerCreated {
                let name = format!("{}_{}_{}", metadata.name, sandbox.pod, metadata.attempt);
                let of = existing.id.as_str();
                return Err(Status::failed_precondition(format!(
                    "failed to reserve container name {name:?}: name {name:?} is reserved for {of:?}"
                )));
            }
            let made_for = existing.meta().config.unwrap_or_default();
            if request.config.as_ref().is_some_and(|config| essence(&made_for) == essence(config)) {
                return Ok(existing.id);
            }
            self.erase_container(&existing).await?;
        }
        let cell = self.reachable_cell(&sandbox, None).await?;
        self.settle_attempts(&cell, &sandbox, metadata).await?;
        let made = Box::pin(self.make_container(&cell, &sandbox, request)).await;
        self.forget_if_gone(&cell);
        made
    }

    /// Whoever ended a cell while something was brought into it has forgotten what was not yet
    /// known of it.
    pub(super) fn forget_if_gone(&self, cell: &Cell) {
        if self.parts.cells.get(&cell.id).is_none() {
            self.parts.volumes.release(&cell.id);
            self.parts.images.forget_cell(&cell.id);
        }
    }

    async fn make_container(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        request: &cri::CreateContainerRequest,
    ) -> Result<ContainerId, Status> {
        let meta = sandbox.meta();
        let made_with = meta.config.unwrap_or_default();
        let mut config = request.config.clone().unwrap_or_default();
        // The kubelet makes it anew from the pod for each container: the credentials and
        // annotations of now are in this one.
        let current = request.sandbox_config.as_ref().unwrap_or(&made_with);
        let id = ContainerId::mint().map_err(failure::of_randomness)?;
        let target = match rewrite::target(&config) {
            "" => None,
            target => Some(self.view.container(target)?),
        };
        let hello = calls::connected(cell, &sandbox.pod, None).await?;
        self.check_mounts(cell, &config).await?;
        let mut mounts = self.parts.volumes.prepare(cell, current, &config).await?;
        for (mount, told) in mounts.iter_mut().zip(&mut config.mounts) {
            if let (Some(image), Some(told)) = (&mut mount.image, &mut told.image) {
                image.image =
                    calls::checked_id(self.parts.images.ensure(cell, image, current).await?)?;
                // Which image it was, the container's status says.
                told.image_ref.clone_from(&image.image);
            }
        }
        let image = calls::checked_id(
            self.parts
                .images
                .ensure(cell, &config.image.clone().unwrap_or_default(), current)
                .await?,
        )?;
        let logs = rewrite::log_paths(&made_with, &config, id.as_str());
        if let Some(logs) = &logs {
            self.make_log_dir(cell, &logs.in_pod_dir).await?;
        }
        let profile = self.bring_profile(cell, &hello.pod_dir, &config).await?;
        let told = rewrite::create_container(
            request,
            rewrite::InCell {
                sandbox: &meta.cell_sandbox,
                pod_dir: &hello.pod_dir,
                resolvers: &meta.resolvers,
                image: &image,
                profile,
                mounts,
                log_path: logs.as_ref().map(|logs| logs.in_logs.clone()).unwrap_or_default(),
                target: target.as_ref().map(|target| &*target.cell_container).unwrap_or_default(),
            },
        );
        let cell_container = self.create_in_cell(cell, sandbox, told).await?;
        if let Some(given) = policy::given_kernel_access(&self.rules(), &config) {
            tracing::info!(sandbox = %sandbox.id, pod = %sandbox.pod, container = %id, "the pod {given}");
        }
        let result =
            self.keep_container(cell, sandbox, &id, &cell_container, &config, &image, logs).await;
        match result {
            Ok(()) => self.parts.volumes.keep(cell, current, &config),
            Err(_) => self.remove_in_cell(cell, &cell_container).await,
        }
        result.map(|()| id)
    }

    /// Refuses what the cell's containerd would pass over.
    async fn check_mounts(&self, cell: &Cell, config: &cri::ContainerConfig) -> Result<(), Status> {
        if support::asks_much(config) {
            let mut runtime = calls::runtime(cell);
            let version = calls::within(calls::CALL, cri::VersionRequest::default());
            support::check(
                config,
                &calls::answered(calls::CALL, "Version", runtime.version(version)).await?,
            )?;
        }
        if support::asks_options(config) {
            let mut runtime = calls::runtime(cell);
            let status = calls::within(calls::CALL, cri::StatusRequest::default());
            let status = calls::answered(calls::CALL, "Status", runtime.status(status)).await?;
            support::check_options(config, status.features.as_ref())?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "all that a new container is")]
    async fn keep_container(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        id: &ContainerId,
        cell_container: &str,
        config: &cri::ContainerConfig,
        image: &str,
        logs: Option<rewrite::LogPaths>,
    ) -> Result<(), Status> {
        let request =
            cri::ContainerStatusRequest { container_id: cell_container.to_owned(), verbose: false };
        let mut runtime = calls::runtime(cell);
        let told = calls::answered(
            calls::CALL,
            "ContainerStatus",
            runtime.container_status(calls::within(calls::CALL, request)),
        )
        .await?;
        let told = told.status.unwrap_or_default();
        let logs = logs.map(|logs| (logs.node, logs.in_pod_dir)).unwrap_or_default();
        let meta = records::ContainerMeta {
            id: id.as_str().to_owned(),
            sandbox: sandbox.id.as_str().to_owned(),
            cell_container: cell_container.to_owned(),
            config: Some(rewrite::without_secrets(config)),
            image_ref: calls::checked_reference(&told.image_ref).unwrap_or(image).to_owned(),
            created_unix_nanos: clock::now_after(self.view.latest_of_pod(&sandbox.uid)),
            log_path: logs.0,
            cell_log: logs.1,
            image_id: image.to_owned(),
        };
        let log_base = if meta.log_path.is_empty() {
            0
        } else {
            Logs::base_for(meta.log_path.clone().into()).await
        };
        let status = records::ContainerStatus { log_base, ..Default::default() };
        let _records = sandbox.records.lock().await;
        let mut batch = Batch::default();
        let record = records::ContainerStatus { told: view::kept(&told), ..status.clone() };
        batch.put(Table::Containers, id.as_str(), &meta).put(
            Table::ContainerStatuses,
            id.as_str(),
            &record,
        );
        self.parts.store.commit(batch).await.map_err(|error| failure::of_store(&error))?;
        if self
            .view
            .insert_container(&meta, status, Some(&told))
            .map_err(|error| failure::of_id(&error))?
        {
            return Ok(());
        }
        // The sandbox was stopped meanwhile.
        let mut batch = Batch::default();
        batch.remove(Table::Containers, id.as_str()).remove(Table::ContainerStatuses, id.as_str());
        self.parts.store.commit(batch).await.map_err(|error| failure::of_store(&error))?;
        Err(Status::failed_precondition(format!(
            "sandbox container {:?} is not running",
            sandbox.id.as_str()
        )))
    }

    async fn make_log_dir(&self, cell: &Cell, log: &str) -> Result<(), Status> {
        let path = log.rsplit_once('/').map_or(log, |(dir, _)| dir).to_owned();
        let change = Change::MakeDir(MakeDir { mode: LOG_DIR_MODE, ..Default::default() });
        let changes =
            tokio_stream::iter([FileChange { root: Root::Pod.into(), path, change: Some(change) }]);
        let mut agent = calls::agent(cell);
        calls::answered(
            calls::CALL,
            "ChangeFiles",
            agent.change_files(calls::within(calls::CALL, changes)),
        )
        .await?;
        Ok(())
    }

    /// Creates it in the cell. A container of the same name there that we do not know is what a
    /// lost answer left: it is removed, and made anew.
    async fn create_in_cell(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        told: cri::CreateContainerRequest,
    ) -> Result<String, Status> {
        let create = async || {
            let mut runtime = calls::runtime(cell);
            calls::answered(
                calls::CALL,
                "CreateContainer",
                runtime.create_container(calls::within(calls::CALL, told.clone())),
            )
            .await
        };
        let first = match create().await {
            Ok(made) => return calls::checked_id(made.container_id),
            Err(status) => status,
        };
        let metadata = told.config.as_ref().and_then(|config| config.metadata.clone());
        let Some(left) = self.left_in_cell(cell, &told.pod_sandbox_id, metadata.as_ref()).await
        else {
            return Err(sandbox.restored(&first));
        };
        tracing::info!(pod = %sandbox.pod, cell = %cell.id, "A container whose creation was not answered is made anew");
        self.remove_in_cell(cell, &left).await;
        let made = create().await.map_err(|status| sandbox.restored(&status))?;
        calls::checked_id(made.container_id)
    }

    async fn left_in_cell(
        &self,
        cell: &Cell,
        cell_sandbox: &str,
        metadata: Option<&cri::ContainerMetadata>,
    ) -> Option<String> {
        let filter =
            cri::ContainerFilter { pod_sandbox_id: cell_sandbox.to_owned(), ..Default::default() };
        let request = cri::ListContainersRequest { filter: Some(filter) };
        let mut runtime = calls::runtime(cell);
        let list = calls::answered(
            calls::CALL,
            "ListContainers",
            runtime.list_containers(calls::within(calls::CALL, request)),
        )
        .await
        .ok()?;
        let left = list
            .containers
            .into_iter()
            .find(|container| container.metadata.as_ref() == metadata)?;
        self.view.container_of_cell(&cell.id, &left.id).is_none().then_some(left.id)
    }

    /// Best effort: what stays is found by the next attempt, and ends with the cell.
    pub(super) async fn remove_in_cell(&self, cell: &Cell, cell_container: &str) {
        let request = cri::RemoveContainerRequest { container_id: cell_container.to_owned() };
        let mut runtime = calls::runtime(cell);
        let call = runtime.remove_container(calls::within(calls::CALL, request));
        if let Err(status) = calls::answered(calls::CALL, "RemoveContainer", call).await
            && let Some(suppressed) = cell.link.lines.admit()
        {
            tracing::warn!(cell = %cell.id, cell_container, status = status.message(), suppressed, "A container could not be removed from its cell");
        }
    }
}

fn same(one: &cri::CreateContainerRequest, other: &cri::CreateContainerRequest) -> bool {
    let of = |request: &cri::CreateContainerRequest| {
        request.config.as_ref().map(|config| (essence(config), config.envs.clone()))
    };
    of(one) == of(other)
}

/// What makes a container's config another. The kubelet names a new file for the termination
/// message in each attempt, labels and annotations may change meanwhile, and of the environment
/// only the names are kept.
fn essence(config: &cri::ContainerConfig) -> cri::ContainerConfig {
    let mut config = rewrite::without_secrets(config);
    for mount in &mut config.mounts {
        mount.host_path.clear();
        if let Some(image) = &mut mount.image {
            image.image_ref.clear();
        }
    }
    config.labels.clear();
    config.annotations.clear();
    config
}
