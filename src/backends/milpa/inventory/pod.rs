//! Pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kiyot_engine::{
    engine::{CellView, OrderView, Step},
    id::CellId,
    placement::{Amount, ApiRequests, Requested},
    provider::InstanceNames,
    request::keys::KEYS,
};
use kiyot_proto::{admin, cri};

use super::{
    Inventory, PodItem, PodKey, offering, unit,
    unit::{Failures, Unit},
};
use crate::{
    annotations,
    backends::milpa::pods::{Container, Sandbox},
};

impl Inventory {
    /// Returns a pod; `None` if it was removed meanwhile.
    pub fn pod(&self, key: &PodKey) -> Option<admin::Pod> {
        let pod = match &key.item {
            PodItem::Waiting(order) => self.waiting(order),
            PodItem::Sandbox(id) => self.placed(&self.pods.sandbox(id.as_str()).ok()?),
        };
        Some(admin::Pod { is_replaced: key.is_replaced, ..pod })
    }

    /// Returns a pod that waits for its cell.
    fn waiting(&self, order: &OrderView) -> admin::Pod {
        // After a restart of the daemon, known from the kubelet's next call on.
        let launching = self.cri.launching(&order.key);
        let request = launching.map(|launching| launching.request.clone()).unwrap_or_default();
        let config = request.config.unwrap_or_default();
        let resources = resources(&config, self.cri.known_requests(&order.key.pod_uid));
        let (annotations, others) = shown_annotations(config.annotations);
        let cell = order.cell.as_ref().and_then(|cell| self.view(cell));
        let phase = match order.cell {
            Some(_) => admin::PodPhase::Dispatching,
            None => admin::PodPhase::Waiting,
        };
        admin::Pod {
            namespace: order.key.namespace.clone(),
            name: order.key.name.clone(),
            uid: order.key.pod_uid.clone(),
            attempt: order.key.attempt,
            sandbox: order.sandbox.to_string(),
            phase: phase.into(),
            phase_since_unix_nanos: order.since_unix_nanos,
            created_unix_nanos: order.since_unix_nanos,
            start_failures: order.failures,
            spot_failure: order.spot_failed,
            message: order.last_error.clone().unwrap_or_default(),
            labels: config.labels,
            annotations,
            other_annotations: others,
            resources,
            runtime_handler: request.runtime_handler,
            cell: order.cell.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..self.with_cell(cell.as_ref())
        }
    }

    /// Returns a pod that has or had a cell.
    fn placed(&self, sandbox: &Sandbox) -> admin::Pod {
        let meta = sandbox.meta();
        let config = meta.config.unwrap_or_default();
        let resources = resources(&config, self.cri.known_requests(&sandbox.uid));
        let metadata = config.metadata.unwrap_or_default();
        let containers = self.pods.containers_of(&sandbox.id);
        let view = self.view(&sandbox.cell);
        let bound = view.as_ref().and_then(|view| view.timeline.at(Step::Bound));
        let (phase, since) = phase(sandbox.ready, &containers);
        let annotations = unit::annotations(config.annotations, meta.current_annotations);
        let lost = containers.iter().find_map(lost);
        let units = Unit::all(containers);
        let failures = Failures(self.cri.pull_failures(&sandbox.id));
        let message = lost.or_else(|| failures.last_pull(&units)).unwrap_or_default();
        let default_unit = Unit::default_of(&units, &annotations);
        let default_unit = default_unit.map(|unit| unit.name.clone()).unwrap_or_default();
        let (annotations, others) = shown_annotations(annotations);
        let instance = view.as_ref().and_then(|view| view.state.instance());
        let names = instance.map(|instance| self.cells.names(instance)).unwrap_or_default();
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
            annotations,
            other_annotations: others,
            units: failures.units(&units),
            default_unit,
            addresses: addresses(meta.addresses, names),
            cell: meta.cell,
            resources,
            message,
            runtime_handler: meta.runtime_handler,
            ..self.with_cell(view.as_ref())
        }
    }

    fn view(&self, cell: &CellId) -> Option<CellView> {
        self.cells.views(std::slice::from_ref(cell)).pop().map(|(view, _)| view)
    }

    /// Returns the fields of a pod that come from its cell.
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

/// Returns the addresses of a pod, and the addresses and names of its instance, in the types that
/// Kubernetes has for nodes.
fn addresses(of_pod: Vec<String>, names: InstanceNames) -> Vec<admin::Address> {
    let public = names.public_address.map(|address| address.to_string());
    let of_instance = [
        ("PrivateDNS", names.private_name),
        ("PublicIP", public),
        ("PublicDNS", names.public_name),
    ];
    let of_instance = of_instance.into_iter().filter_map(|(kind, it)| Some((kind, it?)));
    let all = of_pod.into_iter().map(|address| ("PrivateIP", address)).chain(of_instance);
    all.map(|(kind, address)| admin::Address { r#type: kind.into(), address }).collect()
}

/// Returns the annotations that kiyot reads, and the keys of all others.
fn shown_annotations(all: HashMap<String, String>) -> (HashMap<String, String>, Vec<String>) {
    let (shown, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(key, _)| KEYS.contains(&key.as_str()));
    let others: BTreeSet<_> = others.into_iter().map(|(key, _)| key).collect();
    (shown.into_iter().collect(), others.into_iter().collect())
}

/// Returns the phase of a pod, and since when, if its containers show it.
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

/// Returns the resources of a pod: from its annotations, or else from the Kubernetes API as its
/// cell is sized, or else from CRI. A CPU has 1,024 CPU shares (`MilliCPUToShares` of the kubelet).
fn resources(
    config: &cri::PodSandboxConfig,
    of_api: Option<ApiRequests>,
) -> Option<admin::Resources> {
    let own = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    // A pod with refused annotations gets no cell.
    let asked = annotations::parse(&config.annotations).ok();
    let annotated = asked.filter(|it| {
        let is_sized = it.milli_cpus.is_some() || it.memory_bytes.is_some() || it.gpu.is_some();
        is_sized || it.sustained_cpu
    });
    if own.is_none() && annotated.is_none() && of_api.is_none() {
        return None;
    }
    let of_api = of_api.map(|requests| Requested::of_sandbox(config).with_api(&requests));
    let value = |amount: Option<Amount>| amount.map_or(0, |amount| amount.value);
    let annotated = annotated.as_ref();
    let shares = own.map_or(0, |own| u64::try_from(own.cpu_shares).unwrap_or_default());
    let limit = own.map_or(0, |own| u64::try_from(own.memory_limit_in_bytes).unwrap_or_default());
    let (cpu_millis, memory_bytes) = match of_api {
        Some(api) => (value(api.milli_cpus), value(api.memory_mib) << 20),
        None => (shares.saturating_mul(1000) / 1024, limit),
    };
    Some(admin::Resources {
        cpu_millis: annotated.and_then(|it| it.milli_cpus).unwrap_or(cpu_millis),
        memory_bytes: annotated.and_then(|it| it.memory_bytes).unwrap_or(memory_bytes),
        gpus: annotated.and_then(|it| it.gpu.as_ref()).map_or(0, |gpu| gpu.count),
        sustained_cpu: annotated.is_some_and(|it| it.sustained_cpu),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies O20.
    #[test]
    fn resources_come_from_annotations_before_the_api_before_cri() {
        let config = |shares: i64, annotations: &[(&str, &str)]| cri::PodSandboxConfig {
            linux: Some(cri::LinuxPodSandboxConfig {
                resources: (shares > 0).then(|| cri::LinuxContainerResources {
                    cpu_shares: shares,
                    memory_limit_in_bytes: 7 << 20,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            annotations: annotations
                .iter()
                .map(|(key, value)| (format!("pod.elotl.co/{key}"), (*value).to_owned()))
                .collect(),
            ..Default::default()
        };
        let shown = |config: &cri::PodSandboxConfig| {
            let it = resources(config, None)?;
            Some((it.cpu_millis, it.memory_bytes, it.gpus, it.sustained_cpu))
        };
        assert_eq!(shown(&config(0, &[])), None);
        assert_eq!(shown(&config(0, &[("launch-type", "Spot")])), None);
        assert_eq!(shown(&config(512, &[])), Some((500, 7 << 20, 0, false)));
        let gpu = [("gpu", "2"), ("memory", "1Gi")];
        assert_eq!(shown(&config(512, &gpu)), Some((500, 1 << 30, 2, false)));
        let sustained = [("cpu", "1500m"), ("sustained-cpu", "true")];
        assert_eq!(shown(&config(0, &sustained)), Some((1500, 0, 0, true)));
        // A pod with this annotation is refused.
        assert_eq!(shown(&config(0, &[("cpu", "x")])), None);
        let of_api = ApiRequests {
            milli_cpu_request: 300,
            milli_cpu_limit: Some(2000),
            memory_request: 3 << 30,
            memory_limit: None,
            ..ApiRequests::default()
        };
        let with_api = |config: &cri::PodSandboxConfig| {
            let it = resources(config, Some(of_api.clone())).unwrap();
            (it.cpu_millis, it.memory_bytes)
        };
        assert_eq!(with_api(&config(0, &[])), (2000, 3 << 30));
        assert_eq!(with_api(&config(512, &[("memory", "1Gi")])), (2000, 1 << 30));
    }

    /// Verifies O20.
    #[test]
    fn addresses_include_the_pods_and_further_ones_of_its_instance() {
        let shown = |names: InstanceNames| {
            let addresses = addresses(vec!["10.0.0.9".to_owned()], names);
            let text = |it: &admin::Address| format!("{} {}", it.r#type, it.address);
            addresses.iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(shown(InstanceNames::default()), ["PrivateIP 10.0.0.9"]);
        let names = InstanceNames {
            private_name: Some("ip-10-0-0-9.ec2.internal".to_owned()),
            public_address: Some([203, 0, 113, 7].into()),
            public_name: Some("ec2-203-0-113-7.compute-1.amazonaws.com".to_owned()),
        };
        let expected = [
            "PrivateIP 10.0.0.9",
            "PrivateDNS ip-10-0-0-9.ec2.internal",
            "PublicIP 203.0.113.7",
            "PublicDNS ec2-203-0-113-7.compute-1.amazonaws.com",
        ];
        assert_eq!(shown(names), expected);
    }
}
