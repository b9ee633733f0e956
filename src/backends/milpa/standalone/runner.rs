//! The task of a standalone pod: it observes, plans, and takes a step, until the pod's end is
//! requested.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use futures::future::join_all;
use kiyot_proto::cri;
use prost::Message;
use tokio::{
    sync::{Mutex, watch},
    time::sleep,
};
use tonic::Status;

use super::{
    Entry, Standalone,
    failures::Failures,
    log_rotation, mounts,
    observed::Observed,
    plan::{self, Step},
};
use crate::{
    backends::{
        Method,
        milpa::{
            clock,
            id::SandboxId,
            placement::ApiRequests,
            pods::{Container, Pods},
        },
    },
    blocking::blocking,
    error_chain::error_chain,
    manifest::{Container as Spec, Entry as FileEntry, Login, Node, Pod, PullPolicy},
};

/// The longest wait for a change, after which logs are looked at.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time limit of calls that don't wait for a cell or an image, as the kubelet has it
/// (`runtimeRequestTimeout`).
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// The task's state.
#[derive(Debug)]
pub(super) struct Runner {
    pub(super) standalone: Arc<Standalone>,
    pub(super) entry: Arc<Entry>,
    pub(super) node: Node,
    pod: Result<Pod, String>,
    /// The steps that failed, since those that succeeded.
    failures: Failures,
    /// Held by each step that makes files or mounts of the pod. Such a step goes on without its
    /// caller, and nothing may be made once the end has removed all.
    disk: Arc<Mutex<()>>,
}

/// Returns the config of a pod's sandbox.
pub(super) fn sandbox_config(pod: &Pod, node: &Node, attempt: u32) -> cri::PodSandboxConfig {
    let mut config = pod.sandbox_config(node, attempt);
    if let Some(linux) = &mut config.linux {
        // A kubelet ends everything in its own cgroups that it does not know.
        linux.cgroup_parent = String::new();
    }
    config
}

impl Runner {
    /// Returns the task of a pod, or of a pod whose manifest can't be read and that can only end.
    pub(super) fn new(
        standalone: Arc<Standalone>,
        entry: Arc<Entry>,
        pod: Result<Pod, String>,
        node: Node,
    ) -> Self {
        Self { standalone, entry, node, pod, failures: Failures::default(), disk: Arc::default() }
    }

    /// Runs the pod until its end was requested, and ends it.
    pub(super) async fn run(mut self) {
        let mut requested = self.entry.end.subscribe();
        let grace = tokio::select! {
            grace = next_grace(&mut requested, None) => grace,
            () = self.keep() => return,
        };
        self.end(grace, requested).await;
    }

    /// Takes the steps of the pod for ever.
    async fn keep(&mut self) {
        let pod = match self.pod.clone() {
            Ok(pod) => pod,
            Err(error) => {
                self.entry.set_error(format!("its manifest can't be read: {error}"));
                return std::future::pending().await;
            }
        };
        if let Err(status) = self.restore_memory(&pod).await {
            let (pod, error) = (self.entry.pod(), status.message());
            tracing::warn!(pod, error, "volumes in memory of a standalone pod not made again yet");
        }
        loop {
            let mut observed = Observed::of(self.pods(), &self.entry.uid);
            if self.remove_dead(&pod, &observed).await {
                observed = Observed::of(self.pods(), &self.entry.uid);
            }
            self.round(&pod, &observed).await;
        }
    }

    /// Takes the next step, or waits for it.
    async fn round(&mut self, pod: &Pod, observed: &Observed) {
        let units = observed.units(pod, &self.failures);
        let sandbox = observed.sandbox().map(|(_, state)| state);
        let step = plan::next(sandbox, pod.restart_policy, &units);
        let has_ended = step == Step::Complete && !sandbox.is_some_and(|it| it.is_ready);
        let deadline = self.deadline(pod);
        let left = deadline.map(nanos_until);
        if let Some(at) = deadline.filter(|_| left == Some(Duration::ZERO))
            && (!has_ended || observed.has_run_at(at))
        {
            return self.expire(pod, observed).await;
        }
        // A pod that has ended has no deadline any more.
        let left = left.filter(|left| !left.is_zero()).unwrap_or(Duration::MAX);
        let container = match step {
            Step::Create(index) | Step::Start(index) => pod.all_containers().nth(index),
            _ => None,
        };
        let name = container.map(|container| container.name.as_str());
        let pause = match step {
            Step::Wait(pause) => Some(pause.unwrap_or(MAX_WAIT)),
            _ if has_ended => Some(MAX_WAIT),
            _ => Some(self.failures.left(name, Instant::now())).filter(|left| !left.is_zero()),
        };
        if let Some(pause) = pause {
            return self.wait(observed, pause.min(left)).await;
        }
        let taken = tokio::select! {
            taken = Box::pin(self.take(pod, observed, step)) => taken,
            () = self.rotate_meanwhile() => return,
            // The next round ends what the step has begun.
            () = sleep(left) => return,
        };
        match taken {
            Ok(()) => {
                self.failures.clear(name);
                if let (Step::Create(_), Some(container)) = (step, container)
                    && let Some(ended) = observed.latest(&container.name)
                {
                    self.restarted(container, ended.status.exit_code);
                }
            }
            Err(status) => self.failed(name, &status),
        }
        *self.entry.errors() = self.failures.errors();
    }

    pub(super) fn pods(&self) -> &Pods {
        self.standalone.parts.cri.pods()
    }

    /// Waits until something of the pod changes.
    async fn wait(&self, observed: &Observed, pause: Duration) {
        self.rotate_logs(observed).await;
        let uid = &self.entry.uid;
        let changed = |pods: &Pods| (!Observed::of(pods, uid).is_same(observed)).then_some(());
        // No output: the next round looks by itself.
        let _ = self.pods().wait(pause.min(MAX_WAIT), changed).await;
    }

    /// Rotates logs while a step is taken, such as a long pull.
    async fn rotate_meanwhile(&self) {
        loop {
            sleep(MAX_WAIT).await;
            self.rotate_logs(&Observed::of(self.pods(), &self.entry.uid)).await;
        }
    }

    async fn rotate_logs(&self, observed: &Observed) {
        for container in &observed.containers {
            if let Err(error) = self.rotate_log(container).await {
                let pod = self.entry.pod();
                tracing::warn!(pod, %error, "log of a standalone pod not rotated");
            }
        }
    }

    /// Notes a step that failed: of a container, or of the pod.
    fn failed(&mut self, container: Option<&str>, status: &Status) {
        let error = status.message();
        let pause = self.failures.add(container, error, Instant::now());
        tracing::warn!(
            pod = self.entry.pod(),
            container,
            error,
            retry_in_s = pause.as_secs(),
            "step of a standalone pod failed"
        );
        self.standalone.event(&self.entry, "StepFailed", error);
    }

    /// Returns the time at which the pod has to end, in nanoseconds since 1970.
    fn deadline(&self, pod: &Pod) -> Option<i64> {
        let nanos = pod.active_deadline_secs?.saturating_mul(1_000_000_000);
        Some(self.entry.created_unix_nanos.saturating_add(nanos))
    }

    /// Ends the containers of a pod whose `activeDeadlineSeconds` have passed. The pod stays in
    /// lists, with its logs, as one that has failed.
    async fn expire(&mut self, pod: &Pod, observed: &Observed) {
        let seconds = pod.active_deadline_secs.unwrap_or_default();
        let message = format!("DeadlineExceeded: active for longer than {seconds} s");
        if !self.entry.is_expired.swap(true, Ordering::Relaxed) {
            self.standalone.event(&self.entry, "DeadlineExceeded", &message);
        }
        self.entry.set_error(message);
        let pause = match self.stop_all(pod, observed).await {
            Ok(()) => MAX_WAIT,
            Err(status) => {
                let error = status.message();
                tracing::warn!(pod = self.entry.pod(), error, "expired pod not ended yet");
                self.failures.add(None, error, Instant::now())
            }
        };
        let now = Observed::of(self.pods(), &self.entry.uid);
        self.wait(&now, pause).await;
    }

    /// Ends the pod's launches, containers and sandbox.
    async fn stop_all(&self, pod: &Pod, observed: &Observed) -> Result<(), Status> {
        self.end_launches().await;
        let stops = observed.containers.iter().filter(|container| !container.exited());
        let stops = stops.map(|container| self.stop(container.id.as_str(), pod.grace_secs));
        for stopped in join_all(stops).await {
            stopped?;
        }
        match observed.sandbox() {
            Some((sandbox, state)) if state.is_ready => self.stop_sandbox(&sandbox.id).await,
            _ => Ok(()),
        }
    }

    async fn stop_sandbox(&self, id: &SandboxId) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_string() };
        let _: cri::StopPodSandboxResponse = self.call(Method::StopPodSandbox, &request).await?;
        Ok(())
    }

    async fn take(&self, pod: &Pod, observed: &Observed, step: Step) -> Result<(), Status> {
        let container = |index: usize| {
            pod.all_containers()
                .nth(index)
                .ok_or_else(|| Status::internal(format!("the pod has no container {index}")))
        };
        match step {
            Step::RunSandbox(attempt) => self.run_sandbox(pod, observed, attempt).await,
            Step::Create(index) => self.create(pod, container(index)?, observed).await,
            Step::Start(index) => {
                let latest = observed.latest(&container(index)?.name);
                let id = latest.map(|latest| latest.id.to_string()).unwrap_or_default();
                let request = cri::StartContainerRequest { container_id: id };
                let _: cri::StartContainerResponse =
                    self.call(Method::StartContainer, &request).await?;
                Ok(())
            }
            Step::Complete => {
                if let Some((sandbox, _)) = observed.sandbox() {
                    self.stop_sandbox(&sandbox.id).await?;
                }
                self.standalone.event(&self.entry, "Completed", "its containers have ended");
                Ok(())
            }
            Step::Wait(_) => Ok(()),
        }
    }

    /// Removes containers that have ended, with their logs, but for the latest of each name.
    /// Returns true if it did.
    async fn remove_dead(&self, pod: &Pod, observed: &Observed) -> bool {
        let mut has_removed = false;
        for dead in observed.dead() {
            match self.remove_container(pod, dead).await {
                Ok(()) => has_removed = true,
                Err(status) => {
                    let (pod, error) = (self.entry.pod(), status.message());
                    tracing::warn!(pod, error, "ended container of a standalone pod not removed");
                }
            }
        }
        has_removed
    }

    async fn remove_container(&self, pod: &Pod, dead: &Container) -> Result<(), Status> {
        let metadata = dead.item().metadata.unwrap_or_default();
        let log = PathBuf::from(dead.meta().log_path);
        let request = cri::RemoveContainerRequest { container_id: dead.id.to_string() };
        let _: cri::RemoveContainerResponse = self.call(Method::RemoveContainer, &request).await?;
        let spec = pod.all_containers().find(|container| container.name == metadata.name);
        let message =
            spec.map(|spec| pod.termination_message_file(spec, &self.node, metadata.attempt));
        on_disk(move || log_rotation::remove(&log, message.as_deref())).await
    }

    async fn run_sandbox(
        &self,
        pod: &Pod,
        observed: &Observed,
        attempt: u32,
    ) -> Result<(), Status> {
        // The latest stays: its logs are those that an operator wants to read.
        for earlier in observed.sandboxes.iter().rev().skip(1) {
            self.remove_sandbox(earlier.id.as_str()).await?;
        }
        let (volumes, in_memory) = (pod.files(&self.node, 1), pod.memory_dirs(&self.node));
        self.make(move || {
            mounts::mount_memory(&in_memory)?;
            make_all(&volumes)
        })
        .await?;
        let mut request = pod.run_pod_sandbox(&self.node, attempt);
        request.config = Some(sandbox_config(pod, &self.node, attempt));
        let requests = ApiRequests::of_manifest(pod);
        self.standalone.parts.cri.run_standalone_sandbox(request, requests).await.map(drop)
    }

    async fn create(&self, pod: &Pod, container: &Spec, observed: &Observed) -> Result<(), Status> {
        let Some((sandbox, state)) = observed.sandbox() else { return Ok(()) };
        let config = sandbox_config(pod, &self.node, state.attempt);
        let attempt = observed.next_attempt(&container.name);
        let address = sandbox.meta().addresses.first().and_then(|address| address.parse().ok());
        self.restore_memory(pod).await?;
        let files = pod.container_files(container, &self.node, address, attempt);
        let parts = pod.sub_paths(container, &self.node);
        self.make(move || {
            make_all(&files)?;
            mounts::bind(&parts)
        })
        .await?;
        let image = self.image(pod, container, &config).await?;
        let id = sandbox.id.as_str();
        let mut request = pod.create_container(container, &self.node, id, &config, &image, attempt);
        if let Some(config) = &mut request.config {
            config.annotations.extend([observed.next_annotation(&container.name)]);
        }
        let _: cri::CreateContainerResponse = self.call(Method::CreateContainer, &request).await?;
        Ok(())
    }

    /// Notes that a container was created again after its end with an exit code.
    fn restarted(&self, container: &Spec, code: i32) {
        let message = format!("container {} ended with exit code {code}", container.name);
        self.standalone.event(&self.entry, "Restarted", &message);
    }

    /// Makes a container's image present in the pod's cell, by its policy and with the pod's
    /// credentials. Returns its id.
    async fn image(
        &self,
        pod: &Pod,
        container: &Spec,
        config: &cri::PodSandboxConfig,
    ) -> Result<String, Status> {
        let name = &container.image;
        let image = cri::ImageSpec {
            image: name.clone(),
            annotations: config.annotations.clone(),
            ..Default::default()
        };
        if container.pull_policy != PullPolicy::Always {
            let request = cri::ImageStatusRequest { image: Some(image.clone()), verbose: false };
            let status: cri::ImageStatusResponse = self.call(Method::ImageStatus, &request).await?;
            if let Some(found) = status.image {
                return Ok(found.id);
            }
        }
        if container.pull_policy == PullPolicy::Never {
            return Err(Status::failed_precondition(format!(
                "image {name:?} is not present, and its imagePullPolicy is Never"
            )));
        }
        let logins = pod.pull_secrets.logins(name);
        let mut pulled = self.pull(&image, logins.first().copied(), config).await;
        for login in logins.into_iter().skip(1) {
            if pulled.is_err() {
                pulled = self.pull(&image, Some(login), config).await;
            }
        }
        pulled
    }

    async fn pull(
        &self,
        image: &cri::ImageSpec,
        login: Option<&Login>,
        config: &cri::PodSandboxConfig,
    ) -> Result<String, Status> {
        let auth = login.map(|login| cri::AuthConfig {
            username: login.user.clone(),
            password: login.password.clone(),
            ..Default::default()
        });
        let (image, sandbox_config) = (Some(image.clone()), Some(config.clone()));
        let request = cri::PullImageRequest { image, auth, sandbox_config };
        // Without a deadline, as the kubelet: the pull ends by itself when it makes no progress.
        let cri = &self.standalone.parts.cri;
        let pulled: cri::PullImageResponse =
            cri.call_with(Method::PullImage, &request, None).await?;
        Ok(pulled.image_ref)
    }

    /// Removes a sandbox, which stops it if it still runs.
    pub(super) async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let pod_sandbox_id = id.to_owned();
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
        let _: cri::StopPodSandboxResponse = self.call(Method::StopPodSandbox, &request).await?;
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id };
        let _: cri::RemovePodSandboxResponse =
            self.call(Method::RemovePodSandbox, &request).await?;
        Ok(())
    }

    async fn rotate_log(&self, container: &Container) -> Result<(), Status> {
        let log = PathBuf::from(container.meta().log_path);
        let is_running = container.state() == cri::ContainerState::ContainerRunning;
        // After a start of the daemon, a log is followed once its cell has connected.
        let is_followed = self.standalone.parts.cri.follows_log(&container.id);
        if !is_running || !is_followed || log.as_os_str().is_empty() {
            return Ok(());
        }
        let request = cri::ReopenContainerLogRequest { container_id: container.id.to_string() };
        let reopen = async {
            let _: cri::ReopenContainerLogResponse =
                self.call(Method::ReopenContainerLog, &request).await?;
            Ok(())
        };
        log_rotation::rotate(log, reopen).await
    }

    /// Mounts the volumes in memory and makes their files, as far as the node has lost them.
    async fn restore_memory(&self, pod: &Pod) -> Result<(), Status> {
        let (mut volumes, in_memory) = (pod.files(&self.node, 1), pod.memory_dirs(&self.node));
        self.make(move || {
            mounts::mount_memory(&in_memory)?;
            mounts::retain_absent(&mut volumes, &in_memory);
            make_all(&volumes)
        })
        .await
    }

    /// Runs a step that makes files or mounts of the node.
    async fn make(
        &self,
        step: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), Status> {
        let dir = self.standalone.dir().to_owned();
        self.alone_on_disk(move || {
            private_dir(&dir)?;
            step()
        })
        .await
    }

    /// Runs a step that makes or removes files of the pod, after the one before has ended.
    pub(super) async fn alone_on_disk(
        &self,
        step: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), Status> {
        let alone = Arc::clone(&self.disk).lock_owned().await;
        on_disk(move || {
            let _alone = alone;
            step()
        })
        .await
    }

    /// Calls a method of CRI as the kubelet does.
    pub(super) async fn call<A: Message + Default>(
        &self,
        method: Method,
        request: &impl Message,
    ) -> Result<A, Status> {
        self.call_within(CALL_TIMEOUT, method, request).await
    }

    /// Calls a method of CRI with a time limit.
    pub(super) async fn call_within<A: Message + Default>(
        &self,
        limit: Duration,
        method: Method,
        request: &impl Message,
    ) -> Result<A, Status> {
        let deadline = Some(Instant::now() + limit);
        self.standalone.parts.cri.call_with(method, request, deadline).await
    }
}

/// Waits until a grace period is requested that is not the current one, and returns it.
pub(super) async fn next_grace(
    requested: &mut watch::Receiver<Option<i64>>,
    current: Option<i64>,
) -> i64 {
    // The sender lives as long as the entry.
    let is_next = |grace: &Option<i64>| grace.is_some() && *grace != current;
    let grace = requested.wait_for(is_next).await.ok().and_then(|grace| *grace);
    match grace {
        Some(grace) => grace,
        None => std::future::pending().await,
    }
}

/// Returns the time until a time in nanoseconds since 1970; zero if it has passed.
fn nanos_until(at: i64) -> Duration {
    Duration::from_nanos(u64::try_from(at.saturating_sub(clock::now())).unwrap_or_default())
}

/// Makes directories, files and links of the node.
fn make_all(entries: &[FileEntry]) -> io::Result<()> {
    entries.iter().try_for_each(|entry| {
        entry.make().map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", entry.path().display()))
        })
    })
}

/// Makes a directory that only the daemon's user enters: volumes of Secrets are in it.
pub(super) fn private_dir(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
}

/// Runs a step that reads or writes the disk. Its error is that of the pod's step.
pub(super) async fn on_disk<T: Send + 'static>(
    step: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Status> {
    blocking(step).await.map_err(|error| Status::internal(error_chain(&error)))
}
