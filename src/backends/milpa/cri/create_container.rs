//! `CreateContainer`: volumes, image and seccomp profile are copied to the cell first.

use std::{sync::Arc, time::Instant};

use kiyot_engine::{engine::Step, id::ContainerId};
use kiyot_proto::{
    cell::{FileChange, MakeDir, Root, file_change::Change},
    cri, store as records,
};
use tonic::{Code, Status};

use super::{
    CriService,
    finish_first::finish_first,
    not_running,
    request::{self as requests, HasResources},
    seccomp_copy,
    single_flight::Joined,
    status_code,
};
use crate::backends::milpa::{
    cell_client::{self, CALL_TIMEOUT, CellClient, checked_id, discard_container},
    cells::Cell,
    clock,
    failure::Failure,
    logs::Logs,
    pods::{self, Sandbox},
    policy::{self, seccomp},
    store::{Batch, Table},
    volumes::support,
};

/// Mode of the directory of a container's log in the cell.
const LOG_DIR_MODE: u32 = 0o755;

impl CriService {
    /// Creates a container. If another call has begun to create a container of this name and
    /// attempt, returns that container. The work outlives its caller.
    pub(super) async fn create_container(
        self: &Arc<Self>,
        request: cri::CreateContainerRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::CreateContainerResponse, Status> {
        let sandbox = self.pods.sandbox(&request.pod_sandbox_id)?;
        self.sync.set_owned(&sandbox.id);
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
        if let Some(rules) = self.rules_of_cell(&sandbox.cell) {
            policy::check_container(&rules, config).map_err(status_code::of_refusal)?;
        }
        self.sync.records.refresh_annotations(&sandbox, request.sandbox_config.as_ref()).await;
        let key = (sandbox.id.clone(), metadata.name.clone());
        loop {
            let (service, sandbox, metadata) =
                (Arc::clone(self), sandbox.id.clone(), metadata.clone());
            let joined =
                self.creations.join(&self.tasks, key.clone(), request.clone(), same, |request| {
                    Box::pin(async move {
                        let _creation =
                            service.sync.creations.begin((sandbox.clone(), metadata.name.clone()));
                        service
                            .existing_or_new_container(sandbox.as_str(), &metadata, &request)
                            .await
                    })
                });
            match joined {
                Joined::Same(waiter) => {
                    let id = waiter.outcome(deadline, "CreateContainer").await?;
                    return Ok(cri::CreateContainerResponse {
                        container_id: id.as_str().to_owned(),
                    });
                }
                Joined::Other(waiter) => match waiter
                    .outcome(deadline, "CreateContainer with another config")
                    .await
                {
                    Err(status) if status.code() == Code::DeadlineExceeded => return Err(status),
                    Ok(_) | Err(_) => {}
                },
            }
        }
    }

    async fn existing_or_new_container(
        self: Arc<Self>,
        sandbox: &str,
        metadata: &cri::ContainerMetadata,
        request: &cri::CreateContainerRequest,
    ) -> Result<ContainerId, Status> {
        let sandbox = self.pods.sandbox(sandbox)?;
        if !sandbox.ready {
            return Err(not_running(&sandbox.id));
        }
        if let Some(existing) = self.pods.container_named(&sandbox.id, metadata) {
            if existing.state() != cri::ContainerState::ContainerCreated {
                let name = format!("{}_{}_{}", metadata.name, sandbox.pod, metadata.attempt);
                let holder = existing.id.as_str();
                return Err(Status::failed_precondition(format!(
                    "failed to reserve container name {name:?}: name {name:?} is reserved for \
                     {holder:?}"
                )));
            }
            let existing_config = existing.meta().config.unwrap_or_default();
            if request
                .config
                .as_ref()
                .is_some_and(|config| essence(&existing_config) == essence(config))
            {
                return Ok(existing.id);
            }
            self.remove_from_cell_and_records(&existing).await?;
        }
        let cell = self.connected_cell(&sandbox, None).await?;
        let ended = self.sync.end_stale_attempts(&cell, &sandbox, metadata).await;
        ended.map_err(status_code::of_attempt)?;
        let created = Box::pin(self.new_container(&cell, &sandbox, request)).await;
        self.sync.release_if_ended(&cell);
        created
    }

    async fn new_container(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        request: &cri::CreateContainerRequest,
    ) -> Result<ContainerId, Status> {
        let meta = sandbox.meta();
        let sandbox_config = meta.config.unwrap_or_default();
        let mut config = request.config.clone().unwrap_or_default();
        // With each container, the kubelet sends a new sandbox config with the current credentials
        // and annotations.
        let current = request.sandbox_config.as_ref().unwrap_or(&sandbox_config);
        let id = ContainerId::mint().map_err(status_code::of_randomness)?;
        let target = requests::target(&config).map(|id| self.pods.container(id)).transpose()?;
        let hello = cell_client::connected(cell, &sandbox.pod, None).await?;
        self.check_support(cell, &config).await?;
        let logs = requests::log_paths(&sandbox_config, &config, id.as_str()).map_err(|error| {
            let name = config.metadata.as_ref().map_or("", |metadata| &metadata.name);
            Status::invalid_argument(format!("log of container {name:?}: {error}"))
        })?;
        let api = self.known_requests(&sandbox.uid).unwrap_or_default();
        let figures = if api.node_variables.is_empty() && api.node_files.is_empty() {
            None
        } else {
            self.cells.resources(&cell.id).await
        };
        let mut replaced = meta.replaced_files;
        if let Some(figures) = figures
            && replaced.is_empty()
            && !api.node_files.is_empty()
        {
            let files = requests::replaced_files(&api.node_files, figures);
            let recorded = self.sync.records.set_replaced_files(sandbox, files).await;
            replaced = recorded.map_err(|error| status_code::of_store(&error))?;
        }
        // The image work may take minutes and can be cancelled. Changes of files are short, and
        // must not be left half-made in the cell.
        let files = async {
            let mounts = self.volumes.prepare(cell, current, &config, &replaced).await?;
            if let Some(logs) = &logs {
                self.make_log_dir(cell, &logs.in_pod_dir).await?;
            }
            let profile = seccomp::node_profile(&config);
            Ok((mounts, seccomp_copy::copy(cell, &hello.pod_dir, profile).await?))
        };
        let images = self.ensure_images(cell, &config, current);
        let ((mut mounts, profile), (image, volume_images)) = finish_first(files, images).await?;
        for ((mount, recorded), id) in mounts.iter_mut().zip(&mut config.mounts).zip(volume_images)
        {
            if let (Some(image), Some(recorded), Some(id)) =
                (&mut mount.image, &mut recorded.image, id)
            {
                image.image.clone_from(&id);
                // For the container's status.
                recorded.image_ref = id;
            }
        }
        let rules = self.rules_of(cell.capabilities);
        let mut cell_request = requests::create_container(
            request,
            requests::InCell {
                sandbox: &meta.cell_sandbox,
                pod_dir: &hello.pod_dir,
                resolvers: &meta.resolvers,
                cgroup_parent: &requests::recorded_cgroup_parent(
                    &meta.cgroup_parent,
                    &sandbox_config,
                ),
                image: &image,
                profile,
                mounts,
                log_path: logs.as_ref().map(|logs| logs.in_logs.clone()).unwrap_or_default(),
                target: target.as_ref().map(|target| &*target.cell_container).unwrap_or_default(),
            },
        );
        if rules.capabilities.own_kernel {
            cell_request = cell_request.without_node_hardware();
        }
        if let Some(config) = &mut cell_request.config {
            policy::close_kernel_paths(&rules, config);
            if let Some(figures) = figures {
                requests::replace_node_variables(config, &api.node_variables, figures);
            }
        }
        let cell_container = self.create_in_cell(cell, sandbox, cell_request).await?;
        if let Some(granted) = policy::granted_kernel_access(&rules, &config) {
            tracing::info!(
                sandbox = %sandbox.id,
                pod = %sandbox.pod,
                container = %id,
                "the pod {granted}"
            );
        }
        let result =
            self.record_container(cell, sandbox, &id, &cell_container, &config, &image, logs).await;
        match result {
            Ok(()) => self.volumes.keep(cell, current, &config, &replaced),
            Err(_) => discard_container(cell, &cell_container).await,
        }
        result.map(|()| id)
    }

    /// Makes the images of a container and of its image volumes present in the cell. Returns the id
    /// of the container's image, and of each mount's image.
    async fn ensure_images(
        &self,
        cell: &Cell,
        config: &cri::ContainerConfig,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(String, Vec<Option<String>>), Status> {
        let mut volumes = Vec::with_capacity(config.mounts.len());
        for mount in &config.mounts {
            volumes.push(match &mount.image {
                Some(image) => Some(checked_id(self.images.ensure(cell, image, sandbox).await?)?),
                None => None,
            });
        }
        let image = config.image.clone().unwrap_or_default();
        let image = checked_id(self.images.ensure(cell, &image, sandbox).await?)?;
        self.cells.reached(&cell.id, Step::ImageReady);
        Ok((image, volumes))
    }

    /// Refuses fields that the cell's containerd would ignore.
    async fn check_support(
        &self,
        cell: &Cell,
        config: &cri::ContainerConfig,
    ) -> Result<(), Failure> {
        let client = CellClient::new(cell);
        let mut features = cri::RuntimeFeatures::default();
        if support::needs_features(config) {
            let status = client.status(CALL_TIMEOUT, cri::StatusRequest::default()).await?;
            features = status.features.unwrap_or_default();
        }
        if support::is_met_by(config, &features) {
            return Ok(());
        }
        let version = client.version(CALL_TIMEOUT, cri::VersionRequest::default()).await?;
        support::check(config, &support::Runtime::new(&version, features))
    }

    #[expect(clippy::too_many_arguments, reason = "all parts of a new container's record")]
    async fn record_container(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        id: &ContainerId,
        cell_container: &str,
        config: &cri::ContainerConfig,
        image: &str,
        logs: Option<requests::LogPaths>,
    ) -> Result<(), Status> {
        let request =
            cri::ContainerStatusRequest { container_id: cell_container.to_owned(), verbose: false };
        let response = CellClient::new(cell).container_status(CALL_TIMEOUT, request).await?;
        let reported = response.status.unwrap_or_default();
        let logs = logs.map(|logs| (logs.node, logs.in_pod_dir)).unwrap_or_default();
        let meta = records::ContainerMeta {
            id: id.as_str().to_owned(),
            sandbox: sandbox.id.as_str().to_owned(),
            cell_container: cell_container.to_owned(),
            config: Some(requests::without_secrets(config)),
            image_ref: cell_client::checked_reference(&reported.image_ref)
                .unwrap_or(image)
                .to_owned(),
            created_unix_nanos: clock::now_after(self.pods.latest_of_pod(&sandbox.uid)),
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
        let record =
            records::ContainerStatus { told: pods::reported_details(&reported), ..status.clone() };
        batch.put(Table::Containers, id.as_str(), &meta).put(
            Table::ContainerStatuses,
            id.as_str(),
            &record,
        );
        self.store.commit(batch).await.map_err(|error| status_code::of_store(&error))?;
        if self
            .pods
            .insert_container(&meta, status, Some(&reported))
            .map_err(|error| status_code::of_id(&error))?
        {
            return Ok(());
        }
        // Meanwhile the sandbox has stopped.
        let mut batch = Batch::default();
        batch.remove(Table::Containers, id.as_str()).remove(Table::ContainerStatuses, id.as_str());
        self.store.commit(batch).await.map_err(|error| status_code::of_store(&error))?;
        Err(not_running(&sandbox.id))
    }

    async fn make_log_dir(&self, cell: &Cell, log: &str) -> Result<(), Failure> {
        let path = log.rsplit_once('/').map_or(log, |(dir, _)| dir).to_owned();
        let change = Change::MakeDir(MakeDir { mode: LOG_DIR_MODE, ..Default::default() });
        let change = FileChange { root: Root::Pod.into(), path, change: Some(change) };
        CellClient::new(cell).change_files(CALL_TIMEOUT, vec![change]).await
    }

    /// Creates a container in the cell. First removes an unrecorded container of the same name: the
    /// response to its creation was lost.
    async fn create_in_cell(
        &self,
        cell: &Cell,
        sandbox: &Sandbox,
        request: cri::CreateContainerRequest,
    ) -> Result<String, Failure> {
        let client = CellClient::new(cell);
        let first = match client.create_container(CALL_TIMEOUT, request.clone()).await {
            Ok(made) => return checked_id(made.container_id),
            Err(failure) => failure,
        };
        let metadata = request.config.as_ref().and_then(|config| config.metadata.clone());
        let Some(unrecorded) =
            self.unrecorded_container(cell, &request.pod_sandbox_id, metadata.as_ref()).await
        else {
            return Err(sandbox.restored(&first));
        };
        tracing::info!(
            pod = %sandbox.pod,
            cell = %cell.id,
            "replacing a container left by an unanswered creation"
        );
        discard_container(cell, &unrecorded).await;
        let made = client
            .create_container(CALL_TIMEOUT, request)
            .await
            .map_err(|failure| sandbox.restored(&failure))?;
        checked_id(made.container_id)
    }

    async fn unrecorded_container(
        &self,
        cell: &Cell,
        cell_sandbox: &str,
        metadata: Option<&cri::ContainerMetadata>,
    ) -> Option<String> {
        let filter =
            cri::ContainerFilter { pod_sandbox_id: cell_sandbox.to_owned(), ..Default::default() };
        let request = cri::ListContainersRequest { filter: Some(filter) };
        let list = CellClient::new(cell).list_containers(CALL_TIMEOUT, request).await.ok()?;
        let container = list
            .containers
            .into_iter()
            .find(|container| container.metadata.as_ref() == metadata)?;
        self.pods.container_of_cell(&cell.id, &container.id).is_none().then_some(container.id)
    }
}

fn same(a: &cri::CreateContainerRequest, b: &cri::CreateContainerRequest) -> bool {
    let compared = |request: &cri::CreateContainerRequest| {
        request.config.as_ref().map(|config| (essence(config), config.envs.clone()))
    };
    compared(a) == compared(b)
}

/// Returns the parts of a config that identify a container. Each call names a new file for the
/// termination message, labels and annotations may change, and only the names of environment
/// variables are recorded.
fn essence(config: &cri::ContainerConfig) -> cri::ContainerConfig {
    let mut config = requests::without_secrets(config);
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
