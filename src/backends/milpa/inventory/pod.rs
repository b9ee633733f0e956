//! Pods.

use std::collections::BTreeMap;

use kiyot_proto::{admin, cri, store};

use super::{Inventory, PodItem, PodKey, offering};
use crate::{
    annotations::KEYS,
    backends::milpa::{
        cells::{CellView, OrderView, Step},
        id::CellId,
        pods::{Container, Sandbox},
        standalone::View,
    },
};

impl PodKey {
    /// Returns namespace/name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true for a pod of a namespace, empty for all, with this name, uid or sandbox; empty
    /// for all.
    pub fn is_of(&self, namespace: &str, name: &str) -> bool {
        let Some((own_namespace, own_name)) = self.name.split_once('/') else { return false };
        let sandbox = match &self.item {
            PodItem::Waiting(order) => order.sandbox.as_str(),
            PodItem::Sandbox(id) => id.as_str(),
            PodItem::Standalone(view) => view.uid.as_str(),
        };
        (namespace.is_empty() || own_namespace == namespace)
            && (name.is_empty() || own_name == name || sandbox == name)
    }
}

impl Inventory {
    /// Returns a pod; `None` if it was removed since.
    pub fn pod(&self, key: &PodKey) -> Option<admin::Pod> {
        match &key.item {
            PodItem::Waiting(order) => Some(self.waiting(order)),
            PodItem::Sandbox(id) => Some(self.placed(&self.pods.sandbox(id.as_str()).ok()?)),
            PodItem::Standalone(view) => Some(self.pending(view)),
        }
    }

    /// Returns a pod that waits for its cell.
    fn waiting(&self, order: &OrderView) -> admin::Pod {
        let cell = order.cell.as_ref().and_then(|cell| self.view(cell));
        let phase = match order.cell {
            Some(_) => admin::PodPhase::Dispatching,
            None => admin::PodPhase::Waiting,
        };
        admin::Pod {
            namespace: order.namespace.clone(),
            name: order.name.clone(),
            uid: order.pod_uid.clone(),
            attempt: order.attempt,
            sandbox: order.sandbox.to_string(),
            phase: phase.into(),
            phase_since_unix_nanos: order.since_unix_nanos,
            created_unix_nanos: order.since_unix_nanos,
            start_failures: order.failures,
            spot_failure: order.spot_failed,
            message: order.last_error.clone(),
            is_standalone: self.standalone.has(&order.pod_uid),
            cell: order.cell.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..self.with_cell(cell.as_ref())
        }
    }

    /// Returns a standalone pod whose sandbox is not ordered yet.
    fn pending(&self, view: &View) -> admin::Pod {
        let phase = match view.is_ending {
            true => admin::PodPhase::Terminated,
            false => admin::PodPhase::Waiting,
        };
        admin::Pod {
            namespace: view.namespace.clone(),
            name: view.name.clone(),
            uid: view.uid.clone(),
            phase: phase.into(),
            phase_since_unix_nanos: view.created_unix_nanos,
            created_unix_nanos: view.created_unix_nanos,
            message: view.error.clone(),
            is_standalone: true,
            ..self.with_cell(None)
        }
    }

    /// Returns a pod that has a cell, or had one.
    fn placed(&self, sandbox: &Sandbox) -> admin::Pod {
        let meta = sandbox.meta();
        let config = meta.config.unwrap_or_default();
        let metadata = config.metadata.unwrap_or_default();
        let containers = self.pods.containers_of(&sandbox.id);
        let view = self.view(&sandbox.cell);
        let bound = view.as_ref().and_then(|view| view.timeline.at(Step::Bound));
        let (phase, since) = phase(sandbox.ready, &containers);
        let annotations = if meta.current_annotations.is_empty() {
            config.annotations
        } else {
            meta.current_annotations
        };
        let (annotations, others): (Vec<_>, Vec<_>) =
            annotations.into_iter().partition(|(key, _)| KEYS.contains(&key.as_str()));
        let addresses = meta
            .addresses
            .into_iter()
            .map(|address| admin::Address { r#type: "PrivateIP".to_owned(), address });
        admin::Pod {
            namespace: metadata.namespace,
            name: metadata.name,
            uid: metadata.uid,
            attempt: metadata.attempt,
            sandbox: meta.id,
            phase: phase.into(),
            phase_since_unix_nanos: since.or(bound).unwrap_or(meta.created_unix_nanos),
            created_unix_nanos: meta.created_unix_nanos,
            labels: config.labels,
            annotations: annotations.into_iter().collect(),
            other_annotations: others.into_iter().map(|(key, _)| key).collect(),
            units: units(&containers),
            addresses: addresses.collect(),
            cell: meta.cell,
            resources: config.linux.and_then(|linux| linux.resources).map(|own| resources(&own)),
            message: containers
                .iter()
                .find_map(lost)
                .unwrap_or_else(|| self.standalone.error_of(&sandbox.uid)),
            is_standalone: meta.standalone,
            runtime_handler: meta.runtime_handler,
            ..self.with_cell(view.as_ref())
        }
    }

    fn view(&self, cell: &CellId) -> Option<CellView> {
        self.cells.views(std::slice::from_ref(cell)).pop().map(|(view, _)| view)
    }

    /// Returns the fields of a pod that its cell has.
    fn with_cell(&self, cell: Option<&CellView>) -> admin::Pod {
        let instance = cell.and_then(|cell| cell.state.instance());
        admin::Pod {
            backend: self.backend.to_string(),
            node: self.node.clone(),
            instance: instance.map(ToString::to_string).unwrap_or_default(),
            offering: cell.and_then(|cell| cell.offering.as_ref()).map(offering::priced),
            start_failures: cell.map_or(0, |cell| cell.earlier.failures),
            spot_failure: cell.is_some_and(|cell| cell.earlier.spot_failed),
            ..admin::Pod::default()
        }
    }
}

/// Returns the phase of a pod, and the time since which it has it if its containers say it.
fn phase(is_ready: bool, containers: &[Container]) -> (admin::PodPhase, Option<i64>) {
    if is_ready {
        return (admin::PodPhase::Running, None);
    }
    let latest = latest(containers);
    let ended = latest.values().map(|container| container.status.finished_unix_nanos).max();
    let is_success = |container: &&&Container| {
        container.exited() && container.status.exit_code == 0 && container.status.reason != LOST
    };
    let phase = match (latest.len(), latest.values().filter(is_success).count()) {
        (0, _) => admin::PodPhase::Terminated,
        (all, successful) if all == successful => admin::PodPhase::Succeeded,
        _ => admin::PodPhase::Failed,
    };
    (phase, ended.filter(|ended| *ended > 0))
}

/// The reason of a container whose cell was lost.
const LOST: &str = "CellLost";

/// Returns the message of a container whose cell was lost.
fn lost(container: &Container) -> Option<String> {
    (container.status.reason == LOST).then(|| container.status.message.clone())
}

/// Returns the latest container of each name.
fn latest(containers: &[Container]) -> BTreeMap<String, &Container> {
    let mut latest: BTreeMap<String, &Container> = BTreeMap::new();
    for container in containers {
        let name = container.item().metadata.unwrap_or_default().name;
        let known = latest.entry(name).or_insert(container);
        if known.sequence < container.sequence {
            *known = container;
        }
    }
    latest
}

/// Returns the units of a pod, in the order in which their latest containers were created.
fn units(containers: &[Container]) -> Vec<admin::Unit> {
    let mut latest: Vec<&Container> = latest(containers).into_values().collect();
    latest.sort_by_key(|container| container.sequence);
    latest.into_iter().map(unit).collect()
}

fn unit(container: &Container) -> admin::Unit {
    let store::ContainerMeta { id, config, created_unix_nanos, .. } = container.meta();
    let config = config.unwrap_or_default();
    let metadata = config.metadata.unwrap_or_default();
    let status = &container.status;
    let state = match container.state() {
        cri::ContainerState::ContainerRunning => admin::UnitState::UnitRunning,
        cri::ContainerState::ContainerExited => admin::UnitState::UnitTerminated,
        _ => admin::UnitState::UnitWaiting,
    };
    let image = config.image.unwrap_or_default();
    let by_user = image.user_specified_image;
    admin::Unit {
        name: metadata.name,
        container: id,
        image: if by_user.is_empty() { image.image } else { by_user },
        command: config.command,
        args: config.args,
        env: config.envs.into_iter().map(|variable| variable.key).collect(),
        state: state.into(),
        created_unix_nanos,
        started_unix_nanos: status.started_unix_nanos,
        finished_unix_nanos: status.finished_unix_nanos,
        exit_code: status.exit_code,
        reason: status.reason.clone(),
        message: status.message.clone(),
        restarts: metadata.attempt,
        working_dir: config.working_dir,
        start_failure: status.reason == "StartError",
        stdin: config.stdin,
        tty: config.tty,
    }
}

/// Returns the requests of a pod: CPU shares are 1,024 a CPU (`MilliCPUToShares` of the kubelet).
fn resources(of_pod: &cri::LinuxContainerResources) -> admin::Resources {
    let shares = u64::try_from(of_pod.cpu_shares).unwrap_or_default();
    admin::Resources {
        cpu_millis: shares.saturating_mul(1000) / 1024,
        memory_bytes: u64::try_from(of_pod.memory_limit_in_bytes).unwrap_or_default(),
        ..admin::Resources::default()
    }
}
