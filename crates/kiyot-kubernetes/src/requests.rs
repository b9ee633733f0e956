//! The requests and limits of a pod, summed like the scheduler does.
//!
//! Containers run together with sidecars (init containers that always restart). Another init
//! container runs only with the sidecars before it. Resources of the pod itself replace the sums.
//!
//! A request may be moved to an extended resource, with a small remainder in the native resource.
//! The larger of both counts.

use std::collections::{BTreeMap, BTreeSet};

use kiyot_values::{
    names::{EXTENDED_CPU, EXTENDED_MEMORY, EXTENDED_STORAGE, is_gpu},
    quantity::Quantity,
};
use serde::Deserialize;

mod node_figures;

pub use node_figures::NodeFigure;
use node_figures::{ResourceField, Volume};

/// Bounds the containers of a pod that are read.
const MAX_CONTAINERS: usize = 1000;
/// Bounds the uid of a static pod, in bytes. The kubelet's uids are hashes of 32 digits.
const MAX_UID_BYTES: usize = 128;

/// The requests and limits of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Requests {
    /// CPU in thousandths.
    pub milli_cpus: Sum,
    /// Memory in bytes.
    pub memory: Sum,
    /// The sum of requests of ephemeral storage, in bytes.
    pub storage_request: u64,
    /// True if a container has variables in files of volumes (`fileKeyRef`).
    pub has_env_in_files: bool,
    /// The first GPU resource by name, such as `nvidia.com/gpu`.
    pub gpus: Option<String>,
    /// The variables without a limit, which the kubelet fills with the node's figures.
    pub node_variables: Vec<NodeFigure>,
    /// The files of volumes without a limit, which the kubelet fills with the node's figures.
    pub node_files: Vec<NodeFigure>,
}

/// The sums of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// The sum of requests.
    pub request: u64,
    /// The sum of limits; `None` if a container has no limit.
    pub limit: Option<u64>,
}

/// The amounts with which the kubelet counts pods against the node, by the names of resources: CPUs
/// in thousandths, other resources in units.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint(BTreeMap<String, u64>);

impl Footprint {
    /// Returns the amount of a resource.
    pub fn amount(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

impl<'f> std::iter::Sum<&'f Self> for Footprint {
    fn sum<I: Iterator<Item = &'f Self>>(footprints: I) -> Self {
        let mut sum = BTreeMap::new();
        for (name, amount) in footprints.flat_map(|footprint| &footprint.0) {
            let total: &mut u64 = sum.entry(name.clone()).or_default();
            *total = total.saturating_add(*amount);
        }
        Self(sum)
    }
}

/// The parts of a pod that are read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Metadata.
    pub metadata: PodMetadata,
    /// Containers.
    pub spec: PodSpec,
    status: PodStatus,
}

/// The parts of a pod's metadata that are read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMetadata {
    /// Identity of the object, set by the API server.
    pub uid: String,
    /// Version of the object, set by the API server.
    pub resource_version: String,
    annotations: PodAnnotations,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodAnnotations {
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: String,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
    status: String,
}

impl Pod {
    /// Returns the pod's uid in CRI. For the mirror of a static pod, it is the static pod's uid.
    pub fn cri_uid(&self) -> &str {
        let mirror = self.metadata.annotations.mirror.as_deref();
        mirror.filter(|uid| uid.len() <= MAX_UID_BYTES).unwrap_or(&self.metadata.uid)
    }

    /// Returns whether the kubelet has made the pod's sandbox. Until then the pod may get a cell.
    pub fn has_sandbox(&self) -> bool {
        let is_ready =
            |own: &Condition| own.r#type == "PodReadyToStartContainers" && own.status == "True";
        !["", "Pending"].contains(&self.status.phase.as_str())
            || self.status.conditions.iter().any(is_ready)
    }

    /// Returns the amounts with which the kubelet counts the pod: its requests, and the overhead of
    /// its RuntimeClass; no amounts after the pod's end.
    pub fn footprint(&self) -> Footprint {
        if ["Succeeded", "Failed"].contains(&self.status.phase.as_str()) {
            return Footprint::default();
        }
        let spec = &self.spec;
        let containers = spec.containers.iter().chain(&spec.init_containers).take(MAX_CONTAINERS);
        let resources = containers.map(|container| &container.resources).chain(&spec.resources);
        let amounts =
            resources.flat_map(|own| [&own.requests, &own.limits]).chain([&spec.overhead]);
        let names: BTreeSet<&str> = amounts.flat_map(BTreeMap::keys).map(String::as_str).collect();
        let amount = |name: &str| {
            let read = if name == "cpu" { Quantity::milli } else { Quantity::units };
            let resource = Resource { name, extended: None, read };
            let overhead = resource.of(&spec.overhead).unwrap_or_default();
            resource.sum(spec).request.saturating_add(overhead)
        };
        let pods = [("pods".to_owned(), 1)];
        Footprint(
            names.into_iter().map(|name| (name.to_owned(), amount(name))).chain(pods).collect(),
        )
    }
}

/// The containers of a pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    resources: Option<Resources>,
    volumes: Vec<Volume>,
    overhead: BTreeMap<String, Amount>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    resources: Resources,
    restart_policy: Option<String>,
    env: Vec<Variable>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Variable {
    name: String,
    value_from: Option<ValueSource>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ValueSource {
    file_key_ref: Option<serde::de::IgnoredAny>,
    resource_field_ref: Option<ResourceField>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Resources {
    requests: BTreeMap<String, Amount>,
    limits: BTreeMap<String, Amount>,
}

/// A quantity. In YAML it may be a number.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Amount {
    Text(String),
    Number(u64),
}

impl Amount {
    fn quantity(&self) -> Option<Quantity> {
        match self {
            Self::Text(text) => text.parse().ok(),
            Self::Number(number) => number.to_string().parse().ok(),
        }
    }
}

/// A resource, with the reader of its quantities.
#[derive(Clone, Copy)]
struct Resource<'n> {
    name: &'n str,
    /// Name of the extended resource that replaces the requests.
    extended: Option<&'n str>,
    read: fn(Quantity) -> u64,
}

impl Resource<'_> {
    fn of(self, amounts: &BTreeMap<String, Amount>) -> Option<u64> {
        amounts.get(self.name)?.quantity().map(self.read)
    }

    /// Returns request and limit of a container. A limit without a request is also the request.
    fn of_container(self, container: &Container) -> (u64, Option<u64>) {
        let Resources { requests, limits } = &container.resources;
        let of = |it: Self| (it.of(requests).or(it.of(limits)).unwrap_or_default(), it.of(limits));
        let (request, limit) = of(self);
        let extended = self.extended.map(|name| of(Resource { name, ..self }).0);
        (request.max(extended.unwrap_or_default()), limit)
    }

    fn sum(self, spec: &PodSpec) -> Sum {
        // A sum of requests, and a sum of limits. The latter is absent if a summand is.
        type Total = (u64, Option<u64>);
        let plus = |(request, limit): Total, (other, other_limit): Total| -> Total {
            let limit = limit.zip(other_limit).map(|(limit, other)| limit.saturating_add(other));
            (request.saturating_add(other), limit)
        };
        let most = |(request, limit): Total, (other, other_limit): Total| -> Total {
            (request.max(other), limit.zip(other_limit).map(|(limit, other)| limit.max(other)))
        };
        let zero = (0, Some(0));
        let (mut sidecars, mut init) = (zero, zero);
        for container in spec.init_containers.iter().take(MAX_CONTAINERS) {
            let own = plus(self.of_container(container), sidecars);
            if container.restart_policy.as_deref() == Some("Always") {
                sidecars = own;
            }
            init = most(init, own);
        }
        let containers = spec.containers.iter().take(MAX_CONTAINERS);
        let main = containers.map(|container| self.of_container(container)).fold(sidecars, plus);
        let (mut request, mut limit) = most(main, init);
        if let Some(own) = &spec.resources {
            let own_limit = self.of(&own.limits);
            request = self.of(&own.requests).or(own_limit).unwrap_or(request);
            limit = own_limit.or(limit);
        }
        Sum { request, limit: limit.filter(|limit| *limit > 0) }
    }
}

impl Resources {
    /// Returns the first GPU resource with an amount above 0.
    fn gpus(&self) -> Option<&String> {
        let is_some = |amount: &Amount| amount.quantity() != Some(Quantity::default());
        let mut all = self.requests.iter().chain(&self.limits);
        all.find(|(name, amount)| is_gpu(name) && is_some(amount)).map(|(name, _)| name)
    }
}

impl PodSpec {
    /// Returns the requests and limits of the pod.
    pub fn requests(&self) -> Requests {
        let resource = |name, extended, read| Resource { name, extended: Some(extended), read };
        let cpu = resource("cpu", EXTENDED_CPU, Quantity::milli);
        let memory = resource("memory", EXTENDED_MEMORY, Quantity::units);
        let storage = resource("ephemeral-storage", EXTENDED_STORAGE, Quantity::units);
        let containers = self.containers.iter().chain(&self.init_containers).take(MAX_CONTAINERS);
        let gpus = containers.clone().filter_map(|container| container.resources.gpus()).min();
        let in_file = |variable: &Variable| {
            variable.value_from.as_ref().is_some_and(|source| source.file_key_ref.is_some())
        };
        Requests {
            milli_cpus: cpu.sum(self),
            memory: memory.sum(self),
            storage_request: storage.sum(self).request,
            has_env_in_files: containers.flat_map(|container| &container.env).any(in_file),
            gpus: gpus.cloned(),
            node_variables: self.node_variables(),
            node_files: self.node_files(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn requests(spec: serde_json::Value) -> Requests {
        let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
        pod.spec.requests()
    }

    /// Verifies K10.
    #[test]
    fn requests_and_limits_are_summed_as_the_scheduler_sums_them() {
        let both = |cpu: &str, memory: &str| {
            let requests = json!({ "cpu": cpu, "memory": memory });
            json!({ "resources": { "requests": requests } })
        };
        let summed = requests(json!({ "containers": [both("100m", "64Mi"), both("1", "1Gi")] }));
        assert_eq!(summed.milli_cpus, Sum { request: 1100, limit: None });
        assert_eq!(summed.memory.request, (64 << 20) + (1 << 30));
        // An init container that is larger than all other containers together.
        let with_init = requests(json!({
            "containers": [both("100m", "64Mi")], "initContainers": [both("2", "1Mi")],
        }));
        assert_eq!((with_init.milli_cpus.request, with_init.memory.request), (2000, 64 << 20));
        // A sidecar runs beside the containers after it.
        let mut sidecar = both("500m", "1Mi");
        sidecar["restartPolicy"] = json!("Always");
        let with_sidecar = requests(json!({
            "containers": [both("1", "1Mi")],
            "initContainers": [both("1800m", "1Mi"), sidecar, both("1200m", "1Mi")],
        }));
        assert_eq!(with_sidecar.milli_cpus.request, 1800);
        assert_eq!(with_sidecar.memory.request, 2 << 20);
    }

    /// Verifies K14.
    #[test]
    fn pod_counts_with_all_its_resources_and_its_overhead_until_its_end() {
        let pod = |phase: &str| -> Pod {
            let requests = json!({ "cpu": "1500m", "memory": "1Gi", "a.b/c": "2" });
            let container = json!({ "resources": { "requests": requests } });
            let spec = json!({
                "containers": [container, container],
                "initContainers": [{ "resources": { "limits": { "cpu": "4" } } }],
                "overhead": { "memory": "128Mi" },
            });
            let pod = json!({ "spec": spec, "status": { "phase": phase } });
            serde_json::from_value(pod).unwrap()
        };
        let footprints =
            ["Pending", "Running", "Succeeded", "Failed"].map(|phase| pod(phase).footprint());
        let sum: Footprint = footprints.iter().sum();
        let amounts = ["cpu", "memory", "a.b/c", "pods", "x"].map(|name| sum.amount(name));
        assert_eq!(amounts, [8000, 4 * (1 << 30) + 2 * (128 << 20), 8, 2, 0]);
        assert_eq!(footprints[0], footprints[1]);
    }

    /// Verifies K18.
    #[test]
    fn extended_resources_count_in_place_of_requests() {
        let extended = json!({
            "pod.elotl.co/cpu": "16",
            "pod.elotl.co/memory": "64Gi",
            "pod.elotl.co/ephemeral-storage": "20Gi",
        });
        let mut remainder = extended.clone();
        for (name, rest) in [("cpu", "16m"), ("memory", "1Mi"), ("ephemeral-storage", "1Mi")] {
            remainder[name] = json!(rest);
        }
        let moved = json!({ "resources": { "requests": remainder, "limits": extended } });
        let by_hand = json!({ "resources": { "limits": extended } });
        let own = json!({ "cpu": "500m", "memory": "1Gi", "ephemeral-storage": "1Gi" });
        let own = json!({ "resources": { "requests": own } });
        let sums = requests(json!({ "containers": [moved, by_hand, own] }));
        assert_eq!(sums.milli_cpus, Sum { request: 32_500, limit: None });
        assert_eq!(sums.memory, Sum { request: 129 << 30, limit: None });
        assert_eq!(sums.storage_request, 41 << 30);
        // The larger amount counts, and limits stay.
        let limits = json!({ "cpu": "4", "pod.elotl.co/cpu": "1" });
        let larger = json!({ "resources": { "limits": limits } });
        let sums = requests(json!({ "containers": [larger] }));
        assert_eq!(sums.milli_cpus, Sum { request: 4000, limit: Some(4000) });
        let gpus = json!({ "nvidia.com/gpu": "0", "pod.elotl.co/gpu": "2" });
        let gpus = requests(json!({ "containers": [{ "resources": { "limits": gpus } }] }));
        assert_eq!(gpus.gpus.as_deref(), Some("pod.elotl.co/gpu"));
    }

    /// Verifies V109.
    #[test]
    fn ephemeral_storage_is_summed_as_the_scheduler_sums_it() {
        let storage =
            |amount: &str| json!({ "resources": { "requests": { "ephemeral-storage": amount } } });
        let mut sidecar = storage("1Gi");
        sidecar["restartPolicy"] = json!("Always");
        let of = |init: &str| {
            let init = json!([sidecar, storage(init)]);
            let pod =
                json!({ "containers": [storage("2Gi"), storage("3Gi")], "initContainers": init });
            requests(pod).storage_request
        };
        assert_eq!((of("4Gi"), of("7Gi")), (6 << 30, 8 << 30));
        let limits = json!({ "resources": { "limits": { "ephemeral-storage": "5G" } } });
        assert_eq!(requests(json!({ "containers": [limits, {}] })).storage_request, 5_000_000_000);
    }

    /// Verifies K10.
    #[test]
    fn limit_is_known_if_every_container_has_a_limit() {
        let limited = json!({ "resources": { "limits": { "cpu": 2, "memory": "1Gi" } } });
        let all = requests(json!({ "containers": [limited, limited] }));
        assert_eq!(all.milli_cpus, Sum { request: 4000, limit: Some(4000) });
        let some = requests(json!({ "containers": [limited, {}] }));
        assert_eq!(some.milli_cpus, Sum { request: 2000, limit: None });
        let of_pod = requests(json!({
            "containers": [{}],
            "resources": { "requests": { "cpu": "3" }, "limits": { "memory": "2Gi" } },
        }));
        assert_eq!(of_pod.milli_cpus, Sum { request: 3000, limit: None });
        assert_eq!(of_pod.memory, Sum { request: 2 << 30, limit: Some(2 << 30) });
        assert_eq!(requests(json!({ "containers": [{}] })), Requests::default());
    }

    /// Verifies U28.
    #[test]
    fn gpu_resource_is_read_by_name() {
        let limited = |limits: serde_json::Value| json!({ "resources": { "limits": limits } });
        for (limits, name) in [
            (json!({ "nvidia.com/gpu": "1" }), Some("nvidia.com/gpu")),
            (json!({ "amd.com/gpu": 2, "cpu": 1 }), Some("amd.com/gpu")),
            (json!({ "nvidia.com/mig-1g.5gb": 1 }), Some("nvidia.com/mig-1g.5gb")),
            (json!({ "nvidia.com/gpu": "0" }), None),
            (json!({ "smarter-devices/fuse": 1 }), None),
        ] {
            let (plain, own) = (json!({}), limited(limits));
            let main = requests(json!({ "containers": [plain, own] }));
            let init = requests(json!({ "containers": [plain], "initContainers": [own] }));
            assert_eq!([main.gpus.as_deref(), init.gpus.as_deref()], [name; 2]);
        }
    }
}
