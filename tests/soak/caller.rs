//! A caller: leads the pods of its plan as a kubelet does, round after round, whatever fails.

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
    plan::{ContainerShape, End, Life, Place, Plan, Step, Victim, Work},
    shape,
    shared::{Kills, KnownContainer, KnownSandbox, Shared},
};

/// Between two rounds of a kubelet.
const ROUND: Duration = Duration::from_millis(200);
/// Attempts of a container that ends by itself, or never starts.
const MAX_ATTEMPTS: usize = 2;
/// Rounds in which a pod that must be refused is tried.
const REFUSED_ROUNDS: usize = 2;
/// The longest that something may take once nothing is killed any more: several calls, each of
/// which a busy machine does within [`LIMIT`].
const CALLS_LIMIT: Duration = Duration::from_secs(3 * LIMIT.as_secs());
/// The longest wait for a connection to a port of the node.
const CONNECT: Duration = Duration::from_millis(500);

/// A log, and what was killed when its container was made.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    kills: Kills,
    work: Work,
}

/// A caller with the pod that it leads now.
#[derive(Debug)]
pub(crate) struct Caller {
    shared: Arc<Shared>,
    kubelet: Kubelet,
    life: Life,
    spec: Pod,
    config: cri::PodSandboxConfig,
    logs: Vec<Log>,
    /// By name: how often the image was pulled in vain.
    pulls: HashMap<String, usize>,
    /// By volume: the version that was written last, and the one that was seen last.
    versions: BTreeMap<usize, (u32, u32)>,
    step: String,
}

/// Leads the lives of a caller's plan until it is calm, and then two more that must work: one on
/// the node and one in a cell.
pub(crate) async fn lead(shared: Arc<Shared>, kubelet: Kubelet, plan: Plan, caller: usize) {
    for number in 0.. {
        if shared.is_calm() {
            break;
        }
        Caller::of(&shared, &kubelet, plan.life(caller, number)).live().await;
    }
    for place in [Place::Node, Place::CellByAnnotation] {
        Caller::of(&shared, &kubelet, plan.calm_life(caller, place)).live().await;
    }
}

impl Caller {
    /// A caller at the beginning of a life.
    pub(crate) fn of(shared: &Arc<Shared>, kubelet: &Kubelet, life: Life) -> Self {
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

    /// Lives the whole life.
    pub(crate) async fn live(mut self) {
        let everything_works = self.shared.is_calm();
        self.shared.pods.fetch_add(1, Ordering::Relaxed);
        if self.life.is_refused() {
            self.is_refused().await;
        } else {
            self.settles().await;
            for (number, step) in self.life.steps.clone().into_iter().enumerate() {
                // What was planned for the storm alone is left out when it is over.
                if self.shared.is_calm() && !everything_works {
                    break;
                }
                self.step = format!("step {number} {step:?}");
                self.carries_out(step, everything_works).await;
                self.settles().await;
            }
        }
        self.step = format!("end {:?}", self.life.end);
        self.logs_are_right();
        let begun = Until::begin();
        self.until(begun, "the pod is removed", async |caller| caller.removes().await.map(Some))
            .await;
        self.logs_are_right();
        self.kubelet.forget(&self.spec);
    }

    /// This pod and where it is, for findings.
    fn pod(&self) -> String {
        format!(
            "caller {} life {} ({}, {:?}), {}",
            self.life.caller, self.life.number, self.spec.uid, self.life.place, self.step
        )
    }

    fn finds(&self, finding: &str) {
        self.shared.finds(format!("{}: {finding}", self.pod()));
    }

    /// Counts a call and hands its outcome on.
    fn counted<T>(&self, outcome: Result<T, Status>) -> Result<T, Status> {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        if outcome.is_err() {
            self.shared.failed.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Begins a call that changes the pod: while it lasts, the containerd that runs a pod of the
    /// node is not killed.
    async fn changes(&self) -> Option<OwnedRwLockReadGuard<()>> {
        if self.life.place.is_cell() {
            return None;
        }
        Some(Arc::clone(&self.shared.of_node).read_owned().await)
    }

    /// Tries round after round until it is done. The time that it may take begins when it is calm.
    async fn until<T>(
        &mut self,
        mut limit: Until,
        what: &str,
        mut attempt: impl AsyncFnMut(&mut Self) -> Result<Option<T>, Status>,
    ) -> Option<T> {
        let mut last = "nothing failed".to_owned();
        while limit.goes_on(&self.shared) {
            match attempt(self).await {
                Ok(Some(done)) => return Some(done),
                Ok(None) => {}
                Err(status) => last = status.to_string(),
            }
            // Not to wait for something: a kubelet's next round.
            tokio::time::sleep(ROUND).await;
        }
        // A finding of another ends this one, too.
        if self.shared.findings().is_empty() {
            self.finds(&format!("{what}: in vain, {last}"));
        }
        None
    }

    /// Makes rounds until every container is as it should be.
    async fn settles(&mut self) {
        let limit = Until::begin();
        self.until(limit, "the pod is brought up", async |caller| {
            Ok(caller.round().await?.then_some(()))
        })
        .await;
    }

    /// Sees that a pod is refused that asks for what cells don't give.
    async fn is_refused(&mut self) {
        "refusal".clone_into(&mut self.step);
        for _ in 0..REFUSED_ROUNDS {
            match self.round().await {
                Ok(true) => self.finds("a pod that must be refused runs"),
                Ok(false) => {}
                Err(_) => {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// The sandboxes of the pod and their containers, as they are listed.
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

    /// Makes what is missing, as a round of a kubelet. Returns whether nothing was.
    async fn round(&mut self) -> Result<bool, Status> {
        let (sandboxes, containers) = self.listed().await?;
        let ready =
            sandboxes.iter().find(|listed| listed.state() == cri::PodSandboxState::SandboxReady);
        let sandbox = match ready {
            Some(ready) => {
                self.config.metadata.clone_from(&ready.metadata);
                ready.id.clone()
            }
            None => return self.runs_sandbox(&sandboxes).await.map(|()| false),
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
            self.starts(&sandbox, &containers, &container, shape).await?;
            return Ok(false);
        }
        let mut settled = true;
        for index in 0..self.life.containers.len() {
            let (shape, name) = (self.life.containers[index], shape::container_name(index));
            if !self.is_settled(&containers, &sandbox, &name, shape.work) {
                settled = false;
                let container = shape::main(&self.life, index, &self.spec.uid);
                let started = self.starts(&sandbox, &containers, &container, shape).await;
                // What can't start does not keep the others from it.
                if shape.work.stays() {
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
        running || (!work.stays() && attempts.max(in_vain) >= MAX_ATTEMPTS)
    }

    /// Stops what is left of earlier sandboxes and runs the next one.
    async fn runs_sandbox(&mut self, earlier: &[cri::PodSandbox]) -> Result<(), Status> {
        for old in earlier {
            self.shared.ledger().stops(&old.id);
            self.stops_sandbox(&old.id).await?;
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
        let known = KnownSandbox {
            pod: self.pod(),
            cell: self.life.place.is_cell(),
            kills,
            stopping: false,
            removing: false,
        };
        self.shared.ledger().sandboxes.insert(id, known);
        Ok(())
    }

    /// Makes and starts the next attempt of a container.
    async fn starts(
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
                self.finds("a container of an image that is not there was made");
                return Ok(());
            }
            Ok(created) => created,
            Err(status) => {
                *self.pulls.entry(container.name.clone()).or_default() += 1;
                return Err(status);
            }
        };
        let known = KnownContainer {
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
            self.finds("a program that is not there was started");
        }
        if let Some(known) = self.shared.ledger().containers.get_mut(&id) {
            known.started = true;
        }
        Ok(())
    }

    async fn stops_sandbox(&mut self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let _changes = self.changes().await;
        let stopped = self.kubelet.runtime.stop_pod_sandbox(request).await;
        self.counted(stopped).map(drop)
    }

    /// The id of the attempt of a container that runs, as far as anyone can say.
    async fn running(&mut self, container: usize) -> Option<String> {
        let (_, containers) = self.listed().await.ok()?;
        let name = shape::container_name(container);
        let running = containers.into_iter().find(|listed| {
            is_named(listed, &name) && listed.state() == cri::ContainerState::ContainerRunning
        });
        running.map(|running| running.id)
    }

    async fn carries_out(&mut self, step: Step, everything_works: bool) {
        match step {
            Step::Probe { container, code } => {
                self.tries(everything_works, "a probe", async |caller| {
                    caller.probes(container, code).await
                })
                .await;
            }
            Step::Restart { container, grace } => {
                if let Some(id) = self.running(container).await {
                    self.shared.ledger().stops_container(&id);
                    self.tries(everything_works, "a container is stopped", async |caller| {
                        let _changes = caller.changes().await;
                        let stopped = caller.kubelet.stop_container(&id, grace).await;
                        caller.counted(stopped).map(Some)
                    })
                    .await;
                }
            }
            Step::Update { volume } => self.updates(volume, everything_works).await,
            Step::Logs { .. } => self.logs_are_right(),
            Step::Look => {
                self.tries(everything_works, "all is looked at", async |caller| {
                    caller.looks().await.map(Some)
                })
                .await;
            }
            Step::KubeletRestarts => {
                let seen = format!(
                    "2026-02-03T04:05:06.{:09}Z api",
                    self.versions.len() + self.logs.len()
                );
                self.spec.annotations.insert("kubernetes.io/config.seen".to_owned(), seen);
            }
            Step::Connect => self.connects().await,
        }
    }

    /// Tries once, or, when everything works, until it is done.
    async fn tries(
        &mut self,
        everything_works: bool,
        what: &str,
        mut attempt: impl AsyncFnMut(&mut Self) -> Result<Option<()>, Status>,
    ) {
        if everything_works {
            let limit = Until::begin();
            self.until(limit, what, attempt).await;
        } else {
            let _ = attempt(self).await;
        }
    }

    async fn probes(&mut self, container: usize, code: i32) -> Result<Option<()>, Status> {
        let Some(id) = self.running(container).await else { return Ok(None) };
        let script = format!("echo here; exit {code}");
        let said = self.kubelet.exec_sync(&id, &["sh", "-c", &script]).await;
        let said = self.counted(said)?;
        // A cell or a container that ends kills the probe with it.
        if said.code == 137 {
            return Ok(None);
        }
        if said.code != code || said.stdout != "here\n" {
            self.finds(&format!("a probe of exit code {code} gave {said:?}"));
        }
        Ok(Some(()))
    }

    /// Writes a volume anew and looks at it in a container.
    async fn updates(&mut self, volume: usize, everything_works: bool) {
        let (written, _) = self.versions.entry(volume).or_default();
        *written += 1;
        let written = *written;
        let files = shape::files(self.life.volumes[volume], written);
        self.kubelet.update_volume(&self.spec, &shape::volume_name(volume), &files);
        self.tries(everything_works, "the new version of a volume is seen", async |caller| {
            Ok(caller.sees(volume).await?.filter(|seen| *seen == written).map(drop))
        })
        .await;
    }

    /// Returns the version of a volume in a container, if it can be read.
    async fn sees(&mut self, volume: usize) -> Result<Option<u32>, Status> {
        let Some(id) = self.running(0).await else { return Ok(None) };
        let said = self.kubelet.exec_sync(&id, &["sh", "-c", &shape::asks_version(volume)]).await;
        let said = self.counted(said)?;
        // A version may be removed between the first and the second file.
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
            _ => self.finds(&format!(
                "volume {volume} shows {:?}; allowed is one version from {least} to {most}, twice",
                said.stdout
            )),
        }
        Ok(None)
    }

    async fn looks(&mut self) -> Result<(), Status> {
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

    /// Connects to ports of the node that lead to the pod, where nobody listens.
    async fn connects(&mut self) {
        let Ok((sandboxes, _)) = self.listed().await else { return };
        let Some(sandbox) = sandboxes.first() else { return };
        let Ok(status) = self.kubelet.sandbox_status(&sandbox.id).await else { return };
        let ip = status.network.unwrap_or_default().ip;
        let Some((network, _)) = ip.rsplit_once('.') else { return };
        for port in &self.life.ports {
            let Ok(to) = format!("{network}.1:{port}").parse::<SocketAddr>() else { continue };
            let _ = TcpStream::connect_timeout(&to, CONNECT);
            let _ = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"asked", to));
        }
    }

    /// Ends the pod: done when nothing of it is listed.
    async fn removes(&mut self) -> Result<(), Status> {
        let (sandboxes, containers) = self.listed().await?;
        for sandbox in &sandboxes {
            self.shared.ledger().stops(&sandbox.id);
        }
        let ids: Vec<String> = containers.iter().map(|listed| listed.id.clone()).collect();
        match self.life.end {
            End::InOrder => {
                for id in &ids {
                    self.stops_container(id).await?;
                }
            }
            End::AtOnce => {}
            End::Twice => {
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
            self.stops_sandbox(&sandbox.id).await?;
        }
        if self.life.end == End::InOrder {
            for id in ids {
                self.shared.ledger().removes_container(&id);
                let request = cri::RemoveContainerRequest { container_id: id };
                let _changes = self.changes().await;
                let removed = self.kubelet.runtime.remove_container(request).await;
                self.counted(removed)?;
            }
        }
        for sandbox in sandboxes {
            self.shared.ledger().removes(&sandbox.id);
            let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
            let _changes = self.changes().await;
            let removed = self.kubelet.runtime.remove_pod_sandbox(request).await;
            self.counted(removed)?;
            self.shared.ledger().removed(&sandbox.id);
        }
        let (sandboxes, containers) = self.listed().await?;
        if sandboxes.is_empty() && containers.is_empty() {
            return Ok(());
        }
        Err(Status::aborted("something is still listed"))
    }

    /// Stops a container, which must then have ended.
    async fn stops_container(&mut self, id: &str) -> Result<(), Status> {
        let changes = self.changes().await;
        let stopped = self.kubelet.stop_container(id, self.spec.grace).await;
        drop(changes);
        self.counted(stopped)?;
        let status = self.kubelet.container_status(id).await;
        let status = self.counted(status)?;
        // One that was never started has nothing to stop. On the node, containerd 1.6 says OK of a
        // container whose shim has just ended by itself, before it has handled that end
        // (stopContainer: the task is not found).
        let runs = status.state() == cri::ContainerState::ContainerRunning;
        if runs && self.life.place.is_cell() {
            self.finds(&format!("StopContainer of {id} said OK, and it reads RUNNING"));
        }
        Ok(())
    }

    /// Sees that no line of a log is doubled or out of order, nor missing where no one was killed
    /// who has read what is not yet in a file.
    fn logs_are_right(&self) {
        let readers: &[Victim] = if self.life.place.is_cell() {
            &[Victim::Cell, Victim::CellContainerd]
        } else {
            &[Victim::NodeContainerd]
        };
        for log in &self.logs {
            let file = std::fs::read(&log.path).unwrap_or_default();
            let numbers: Vec<u64> = LogLine::parse_all(&file)
                .iter()
                .filter_map(|line| line.text.strip_prefix("line ")?.trim().parse().ok())
                .collect();
            let at = log.path.display();
            if let Some(pair) = numbers.windows(2).find(|pair| pair[0] >= pair[1]) {
                self.finds(&format!(
                    "{at} of {:?}: line {} follows line {}",
                    log.work, pair[1], pair[0]
                ));
            }
            let gap = (1..).zip(&numbers).find(|(number, line)| number != *line);
            if let Some((number, _)) =
                gap.filter(|_| !self.shared.killed_since(&log.kills, readers))
            {
                self.finds(&format!("{at} of {:?}: line {number} is missing", log.work));
            }
        }
    }
}

/// The time that something may take, which begins when it is calm.
#[derive(Debug)]
struct Until {
    begun: Instant,
}

impl Until {
    fn begin() -> Self {
        Self { begun: Instant::now() }
    }

    fn goes_on(&mut self, shared: &Shared) -> bool {
        if !shared.is_calm() {
            self.begun = Instant::now();
        }
        self.begun.elapsed() < CALLS_LIMIT && shared.findings().is_empty()
    }
}

fn is_named(listed: &cri::Container, name: &str) -> bool {
    listed.metadata.as_ref().is_some_and(|of| of.name == name)
}

/// The latest attempt of a container in a sandbox.
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
