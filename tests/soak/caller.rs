//! Callers: each drives the pods of its plan as a kubelet does, and syncs a pod again after each
//! failure.

use std::{
    collections::{BTreeMap, HashMap},
    net::{SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use kiyot_testkit::{Container, Kubelet, LIMIT, LogLine, Pod, RunningContainer, RunningPod, cri};
use tokio::sync::OwnedRwLockReadGuard;
use tonic::Status;

use crate::{
    plan::{ContainerShape, Lifecycle, Place, Plan, Removal, Step, Target, Work},
    shape,
    state::{ContainerEntry, Kills, SandboxEntry, SoakState},
};

/// The time between two syncs of a pod.
const SYNC_PERIOD: Duration = Duration::from_millis(200);
/// The maximal number of attempts of a container that exits by itself or never starts.
const MAX_ATTEMPTS: usize = 2;
/// The number of syncs of a pod that must be refused.
const REFUSED_SYNCS: usize = 2;
/// Time limit of a sync after the last kill. Its calls each take at most [`LIMIT`] on a busy
/// machine.
const SYNC_LIMIT: Duration = Duration::from_secs(3 * LIMIT.as_secs());
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A container log, with the kills before its container was created.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    kills: Kills,
    work: Work,
}

/// A caller with its current pod.
#[derive(Debug)]
pub(crate) struct Caller {
    shared: Arc<SoakState>,
    kubelet: Kubelet,
    life: Lifecycle,
    spec: Pod,
    config: cri::PodSandboxConfig,
    logs: Vec<Log>,
    /// The number of failed pulls, by the name of the container.
    pulls: HashMap<String, usize>,
    /// The version last written and the version last seen, by volume.
    versions: BTreeMap<usize, (u32, u32)>,
    step: String,
}

/// Drives the planned pods of a caller until the kills end. Then drives two pods that must work:
/// one on the node and one in a cell.
pub(crate) async fn drive_pods(
    shared: Arc<SoakState>,
    kubelet: Kubelet,
    plan: Plan,
    caller: usize,
) {
    for number in 0.. {
        if shared.kills_are_over() {
            break;
        }
        Caller::of(&shared, &kubelet, plan.life(caller, number)).drive().await;
    }
    for place in [Place::Node, Place::CellByAnnotation] {
        Caller::of(&shared, &kubelet, plan.undisturbed_pod(caller, place)).drive().await;
    }
}

impl Caller {
    pub(crate) fn of(shared: &Arc<SoakState>, kubelet: &Kubelet, life: Lifecycle) -> Self {
        let spec = shape::pod(&life);
        let config = kubelet.prepare(&spec);
        Self {
            shared: Arc::clone(shared),
            kubelet: kubelet.clone(),
            spec,
            config,
            logs: Vec::new(),
            pulls: HashMap::new(),
            versions: BTreeMap::new(),
            step: "bring-up".to_owned(),
            life,
        }
    }

    /// Drives the pod from its first sync to its removal.
    pub(crate) async fn drive(mut self) {
        let undisturbed = self.shared.kills_are_over();
        self.shared.pods.fetch_add(1, Ordering::Relaxed);
        if self.life.is_refused() {
            self.check_refusal().await;
        } else {
            self.bring_up().await;
            for (number, step) in self.life.steps.clone().into_iter().enumerate() {
                // After the kills, steps that were planned to run under kills are skipped.
                if self.shared.kills_are_over() && !undisturbed {
                    break;
                }
                self.step = format!("step {number} {step:?}");
                self.run_step(step, undisturbed).await;
                self.bring_up().await;
            }
        }
        self.step = format!("end {:?}", self.life.end);
        self.check_logs();
        let begun = TimeLimit::start();
        self.retry(begun, "the pod is removed", async |caller| caller.remove().await.map(Some))
            .await;
        self.check_logs();
        self.kubelet.forget(&self.spec);
    }

    /// Describes the pod and its current step, for findings.
    fn pod(&self) -> String {
        format!(
            "caller {} life {} ({}, {:?}), {}",
            self.life.caller, self.life.number, self.spec.uid, self.life.place, self.step
        )
    }

    fn report(&self, finding: &str) {
        self.shared.report(format!("{}: {finding}", self.pod()));
    }

    /// Counts a call and returns its outcome.
    fn counted<T>(&self, outcome: Result<T, Status>) -> Result<T, Status> {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        if outcome.is_err() {
            self.shared.failed.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Returns the guard of a call that changes the pod. While a guard of a pod on the node is
    /// held, the node's containerd is not killed.
    async fn changes(&self) -> Option<OwnedRwLockReadGuard<()>> {
        if self.life.place.is_cell() {
            return None;
        }
        Some(Arc::clone(&self.shared.node_lock).read_owned().await)
    }

    /// Retries until the attempt succeeds. The time limit starts after the last kill.
    async fn retry<T>(
        &mut self,
        mut limit: TimeLimit,
        what: &str,
        mut attempt: impl AsyncFnMut(&mut Self) -> Result<Option<T>, Status>,
    ) -> Option<T> {
        let mut last = "nothing failed".to_owned();
        while limit.continues(&self.shared) {
            match attempt(self).await {
                Ok(Some(done)) => return Some(done),
                Ok(None) => {}
                Err(status) => last = status.to_string(),
            }
            // The sleep is the period of a kubelet's sync, not a wait for a condition.
            tokio::time::sleep(SYNC_PERIOD).await;
        }
        // The first finding ends all callers.
        if self.shared.findings().is_empty() {
            self.report(&format!("{what}: in vain, {last}"));
        }
        None
    }

    /// Syncs the pod until every container is in its planned state.
    async fn bring_up(&mut self) {
        let limit = TimeLimit::start();
        self.retry(limit, "the pod is brought up", async |caller| {
            Ok(caller.sync().await?.then_some(()))
        })
        .await;
    }

    /// Checks that a pod in a cell with host access is refused.
    async fn check_refusal(&mut self) {
        "refusal".clone_into(&mut self.step);
        for _ in 0..REFUSED_SYNCS {
            match self.sync().await {
                Ok(true) => self.report("a pod that must be refused runs"),
                Ok(false) => {}
                Err(_) => {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Lists the sandboxes of the pod and their containers.
    async fn listed(&mut self) -> Result<(Vec<cri::PodSandbox>, Vec<cri::Container>), Status> {
        let containers = self.kubelet.containers().await;
        let containers = self.counted(containers)?;
        let sandboxes = self.kubelet.sandboxes().await;
        let mut sandboxes = self.counted(sandboxes)?;
        sandboxes
            .retain(|listed| listed.metadata.as_ref().is_some_and(|of| of.uid == self.spec.uid));
        let uid = |listed: &cri::Container| {
            listed.labels.get("io.kubernetes.pod.uid").is_some_and(|uid| *uid == self.spec.uid)
        };
        Ok((sandboxes, containers.into_iter().filter(uid).collect()))
    }

    /// Creates absent objects, as one sync of a kubelet does. Returns whether nothing was absent.
    async fn sync(&mut self) -> Result<bool, Status> {
        let (sandboxes, containers) = self.listed().await?;
        let ready =
            sandboxes.iter().find(|listed| listed.state() == cri::PodSandboxState::SandboxReady);
        let sandbox = match ready {
            Some(ready) => {
                self.config.metadata.clone_from(&ready.metadata);
                ready.id.clone()
            }
            None => return self.run_sandbox(&sandboxes).await.map(|()| false),
        };
        for index in 0..self.life.init.len() {
            let (shape, name) = (self.life.init[index], shape::init_name(index));
            let last = last_attempt(&containers, &sandbox, &name);
            match last.map(|last| (last.state(), last.id.clone())) {
                Some((cri::ContainerState::ContainerExited, id)) => {
                    let status = self.kubelet.container_status(&id).await;
                    if self.counted(status)?.exit_code == 0 {
                        continue;
                    }
                }
                Some((cri::ContainerState::ContainerRunning, _)) => return Ok(false),
                _ => {}
            }
            let container = shape::init(&self.life, index, &self.spec.uid);
            self.create_and_start(&sandbox, &containers, &container, shape).await?;
            return Ok(false);
        }
        let mut settled = true;
        for index in 0..self.life.containers.len() {
            let (shape, name) = (self.life.containers[index], shape::container_name(index));
            if !self.is_settled(&containers, &sandbox, &name, shape.work) {
                settled = false;
                let container = shape::main(&self.life, index, &self.spec.uid);
                let started = self.create_and_start(&sandbox, &containers, &container, shape).await;
                // A container that can't start does not delay the others.
                if shape.work.runs_until_stopped() {
                    started?;
                }
            }
        }
        Ok(settled)
    }

    fn is_settled(
        &self,
        containers: &[cri::Container],
        sandbox: &str,
        name: &str,
        work: Work,
    ) -> bool {
        let running = last_attempt(containers, sandbox, name)
            .is_some_and(|last| last.state() == cri::ContainerState::ContainerRunning);
        let attempts = containers.iter().filter(|listed| is_named(listed, name)).count();
        let in_vain = self.pulls.get(name).copied().unwrap_or(0);
        running || (!work.runs_until_stopped() && attempts.max(in_vain) >= MAX_ATTEMPTS)
    }

    /// Stops earlier sandboxes and runs the next attempt.
    async fn run_sandbox(&mut self, earlier: &[cri::PodSandbox]) -> Result<(), Status> {
        for old in earlier {
            self.shared.ledger().allow_stop(&old.id);
            self.stop_sandbox(&old.id).await?;
        }
        let attempts = earlier.iter().filter_map(|old| old.metadata.as_ref());
        let next = attempts.map(|of| of.attempt + 1).max().unwrap_or(0);
        if let Some(metadata) = self.config.metadata.as_mut() {
            metadata.attempt = next;
        }
        let kills = self.shared.kills();
        let _changes = self.changes().await;
        let run = self.kubelet.run_sandbox(&self.config, &self.spec.runtime_handler).await;
        let id = self.counted(run)?;
        let known = SandboxEntry {
            pod: self.pod(),
            cell: self.life.place.is_cell(),
            kills,
            stopping: false,
            removing: false,
        };
        self.shared.ledger().sandboxes.insert(id, known);
        Ok(())
    }

    /// Creates and starts the next attempt of a container.
    async fn create_and_start(
        &mut self,
        sandbox: &str,
        containers: &[cri::Container],
        container: &Container,
        shape: ContainerShape,
    ) -> Result<(), Status> {
        let attempts = containers
            .iter()
            .filter(|listed| is_named(listed, &container.name))
            .filter_map(|listed| listed.metadata.as_ref());
        let attempt = attempts.map(|of| of.attempt + 1).max().unwrap_or(0);
        let running: RunningPod =
            self.kubelet.running(&self.spec, self.config.clone(), sandbox.to_owned());
        let kills = self.shared.kills();
        let _changes = self.changes().await;
        let created = Box::pin(self.kubelet.create_container(&running, container, attempt)).await;
        let created = match self.counted(created) {
            Ok(_) if shape.work == Work::NoImage => {
                self.report("a container of an absent image was created");
                return Ok(());
            }
            Ok(created) => created,
            Err(status) => {
                *self.pulls.entry(container.name.clone()).or_default() += 1;
                return Err(status);
            }
        };
        let known = ContainerEntry {
            sandbox: sandbox.to_owned(),
            pod: self.pod(),
            name: container.name.clone(),
            work: shape.work,
            cell: self.life.place.is_cell(),
            kills: kills.clone(),
            started: false,
            stopping: false,
            removing: false,
        };
        let RunningContainer { id, log, .. } = created;
        self.shared.ledger().containers.insert(id.clone(), known);
        self.logs.push(Log { path: log, kills, work: shape.work });
        let started = self.kubelet.start_container(&id).await;
        self.counted(started)?;
        if shape.work == Work::NoProgram {
            self.report("an absent program was started");
        }
        if let Some(known) = self.shared.ledger().containers.get_mut(&id) {
            known.started = true;
        }
        Ok(())
    }

    async fn stop_sandbox(&mut self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let _changes = self.changes().await;
        let stopped = self.kubelet.runtime.stop_pod_sandbox(request).await;
        self.counted(stopped).map(drop)
    }

    /// Returns the id of the running attempt of a container, if the list has the attempt.
    async fn running(&mut self, container: usize) -> Option<String> {
        let (_, containers) = self.listed().await.ok()?;
        let name = shape::container_name(container);
        let running = containers.into_iter().find(|listed| {
            is_named(listed, &name) && listed.state() == cri::ContainerState::ContainerRunning
        });
        running.map(|running| running.id)
    }

    async fn run_step(&mut self, step: Step, undisturbed: bool) {
        match step {
            Step::Probe { container, code } => {
                self.try_step(undisturbed, "a probe", async |caller| {
                    caller.probe(container, code).await
                })
                .await;
            }
            Step::Restart { container, grace } => {
                if let Some(id) = self.running(container).await {
                    self.shared.ledger().allow_container_stop(&id);
                    self.try_step(undisturbed, "a container is stopped", async |caller| {
                        let _changes = caller.changes().await;
                        let stopped = caller.kubelet.stop_container(&id, grace).await;
                        caller.counted(stopped).map(Some)
                    })
                    .await;
                }
            }
            Step::Update { volume } => self.update(volume, undisturbed).await,
            Step::Logs { .. } => self.check_logs(),
            Step::Look => {
                self.try_step(
                    undisturbed,
                    "lists, statuses and statistics are read",
                    async |caller| caller.read_all().await.map(Some),
                )
                .await;
            }
            Step::KubeletRestarts => {
                let seen = format!(
                    "2026-02-03T04:05:06.{:09}Z api",
                    self.versions.len() + self.logs.len()
                );
                self.spec.annotations.insert("kubernetes.io/config.seen".to_owned(), seen);
            }
            Step::Connect => self.connect().await,
        }
    }

    /// Tries once while processes are killed; retries until success afterwards.
    async fn try_step(
        &mut self,
        undisturbed: bool,
        what: &str,
        mut attempt: impl AsyncFnMut(&mut Self) -> Result<Option<()>, Status>,
    ) {
        if undisturbed {
            let limit = TimeLimit::start();
            self.retry(limit, what, attempt).await;
        } else {
            let _ = attempt(self).await;
        }
    }

    async fn probe(&mut self, container: usize, code: i32) -> Result<Option<()>, Status> {
        let Some(id) = self.running(container).await else { return Ok(None) };
        let script = format!("echo here; exit {code}");
        let said = self.kubelet.exec_sync(&id, &["sh", "-c", &script]).await;
        let said = self.counted(said)?;
        // The probe is killed with its cell or container.
        if said.code == 137 {
            return Ok(None);
        }
        if said.code != code || said.stdout != "here\n" {
            self.report(&format!("a probe of exit code {code} gave {said:?}"));
        }
        Ok(Some(()))
    }

    /// Updates a volume and reads it in a container.
    async fn update(&mut self, volume: usize, undisturbed: bool) {
        let (written, _) = self.versions.entry(volume).or_default();
        *written += 1;
        let written = *written;
        let files = shape::files(self.life.volumes[volume], written);
        self.kubelet.update_volume(&self.spec, &shape::volume_name(volume), &files);
        self.try_step(undisturbed, "the new version of a volume is seen", async |caller| {
            Ok(caller.read_version(volume).await?.filter(|seen| *seen == written).map(drop))
        })
        .await;
    }

    /// Returns the version that a container reads from a volume, if the version is readable.
    async fn read_version(&mut self, volume: usize) -> Result<Option<u32>, Status> {
        let Some(id) = self.running(0).await else { return Ok(None) };
        let said = self.kubelet.exec_sync(&id, &["sh", "-c", &shape::version_script(volume)]).await;
        let said = self.counted(said)?;
        // A version may be replaced between the reads of its two files.
        if said.code != 0 {
            return Ok(None);
        }
        let versions: Vec<u32> = said.stdout.lines().filter_map(|line| line.parse().ok()).collect();
        let (written, seen) = self.versions.entry(volume).or_default();
        let (least, most) = (*seen, *written);
        match versions[..] {
            [one, other] if one == other && (least..=most).contains(&one) => {
                *seen = one;
                return Ok(Some(one));
            }
            _ => self.report(&format!(
                "volume {volume} shows {:?}; allowed is one version from {least} to {most}, twice",
                said.stdout
            )),
        }
        Ok(None)
    }

    async fn read_all(&mut self) -> Result<(), Status> {
        let (sandboxes, containers) = self.listed().await?;
        for sandbox in &sandboxes {
            let status = self.kubelet.sandbox_status(&sandbox.id).await;
            self.counted(status)?;
        }
        for container in &containers {
            let status = self.kubelet.container_status(&container.id).await;
            self.counted(status)?;
        }
        let stats = self
            .kubelet
            .runtime
            .list_container_stats(cri::ListContainerStatsRequest::default())
            .await;
        self.counted(stats)?;
        let stats = self
            .kubelet
            .runtime
            .list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest::default())
            .await;
        self.counted(stats)?;
        Ok(())
    }

    /// Connects to the host ports of the pod, where no process listens.
    async fn connect(&mut self) {
        let Ok((sandboxes, _)) = self.listed().await else { return };
        let Some(sandbox) = sandboxes.first() else { return };
        let Ok(status) = self.kubelet.sandbox_status(&sandbox.id).await else { return };
        let ip = status.network.unwrap_or_default().ip;
        let Some((network, _)) = ip.rsplit_once('.') else { return };
        for port in &self.life.ports {
            let Ok(to) = format!("{network}.1:{port}").parse::<SocketAddr>() else { continue };
            let _ = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT);
            let _ = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"asked", to));
        }
    }

    /// Stops and removes the pod. Returns an error until the lists have no object of the pod.
    async fn remove(&mut self) -> Result<(), Status> {
        let (sandboxes, containers) = self.listed().await?;
        for sandbox in &sandboxes {
            self.shared.ledger().allow_stop(&sandbox.id);
        }
        let ids: Vec<String> = containers.iter().map(|listed| listed.id.clone()).collect();
        match self.life.end {
            Removal::InOrder => {
                for id in &ids {
                    self.stop_container_checked(id).await?;
                }
            }
            Removal::AtOnce => {}
            Removal::Twice => {
                let (mut other, request) = (self.kubelet.clone(), |id: &str| {
                    cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() }
                });
                for sandbox in &sandboxes {
                    let changes = self.changes().await;
                    let (one, both) = tokio::join!(
                        self.kubelet.runtime.stop_pod_sandbox(request(&sandbox.id)),
                        other.runtime.stop_pod_sandbox(request(&sandbox.id))
                    );
                    drop(changes);
                    self.counted(one)?;
                    self.counted(both)?;
                }
            }
        }
        for sandbox in &sandboxes {
            self.stop_sandbox(&sandbox.id).await?;
        }
        if self.life.end == Removal::InOrder {
            for id in ids {
                self.shared.ledger().allow_container_removal(&id);
                let request = cri::RemoveContainerRequest { container_id: id };
                let _changes = self.changes().await;
                let removed = self.kubelet.runtime.remove_container(request).await;
                self.counted(removed)?;
            }
        }
        for sandbox in sandboxes {
            self.shared.ledger().allow_removal(&sandbox.id);
            let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
            let _changes = self.changes().await;
            let removed = self.kubelet.runtime.remove_pod_sandbox(request).await;
            self.counted(removed)?;
            self.shared.ledger().require_absence(&sandbox.id);
        }
        let (sandboxes, containers) = self.listed().await?;
        if sandboxes.is_empty() && containers.is_empty() {
            return Ok(());
        }
        Err(Status::aborted("something is still listed"))
    }

    /// Stops a container and checks that the container has exited.
    async fn stop_container_checked(&mut self, id: &str) -> Result<(), Status> {
        let changes = self.changes().await;
        let stopped = self.kubelet.stop_container(id, self.spec.grace).await;
        drop(changes);
        self.counted(stopped)?;
        let status = self.kubelet.container_status(id).await;
        let status = self.counted(status)?;
        // For a pod on the node, containerd 1.6 returns OK for a container whose shim has just
        // exited, before it has handled the exit (stopContainer: the task is not found).
        let runs = status.state() == cri::ContainerState::ContainerRunning;
        if runs && self.life.place.is_cell() {
            self.report(&format!(
                "StopContainer of {id} returned OK, but the container reads RUNNING"
            ));
        }
        Ok(())
    }

    /// Checks that the lines of each log are in order and without duplicates. A line may be missing
    /// only if a process that held unwritten lines was killed.
    fn check_logs(&self) {
        let readers: &[Target] = if self.life.place.is_cell() {
            &[Target::Cell, Target::CellContainerd]
        } else {
            &[Target::NodeContainerd]
        };
        for log in &self.logs {
            let file = std::fs::read(&log.path).unwrap_or_default();
            let numbers: Vec<u64> = LogLine::parse_all(&file)
                .iter()
                .filter_map(|line| line.text.strip_prefix("line ")?.trim().parse().ok())
                .collect();
            let at = log.path.display();
            if let Some(pair) = numbers.windows(2).find(|pair| pair[0] >= pair[1]) {
                self.report(&format!(
                    "{at} of {:?}: line {} follows line {}",
                    log.work, pair[1], pair[0]
                ));
            }
            let gap = (1..).zip(&numbers).find(|(number, line)| number != *line);
            if let Some((number, _)) =
                gap.filter(|_| !self.shared.killed_since(&log.kills, readers))
            {
                self.report(&format!("{at} of {:?}: line {number} is missing", log.work));
            }
        }
    }
}

/// A time limit that starts after the last kill.
#[derive(Debug)]
struct TimeLimit {
    begun: Instant,
}

impl TimeLimit {
    fn start() -> Self {
        Self { begun: Instant::now() }
    }

    fn continues(&mut self, shared: &SoakState) -> bool {
        if !shared.kills_are_over() {
            self.begun = Instant::now();
        }
        self.begun.elapsed() < SYNC_LIMIT && shared.findings().is_empty()
    }
}

fn is_named(listed: &cri::Container, name: &str) -> bool {
    listed.metadata.as_ref().is_some_and(|of| of.name == name)
}

/// Returns the latest attempt of a container in a sandbox.
fn last_attempt<'a>(
    containers: &'a [cri::Container],
    sandbox: &str,
    name: &str,
) -> Option<&'a cri::Container> {
    containers
        .iter()
        .filter(|listed| listed.pod_sandbox_id == sandbox && is_named(listed, name))
        .max_by_key(|listed| listed.metadata.as_ref().map_or(0, |of| of.attempt))
}
