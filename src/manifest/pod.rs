//! Pods.

use std::collections::BTreeSet;

use super::{
    Container, Dns, DnsPolicy, Metadata, PodSecurity, QosClass, Resources, Volume, Workload,
    metadata::dns_name, resources,
};
use crate::problems::{Field, Problem, Table};

/// Fields for the scheduler, the API server or the kubelet alone.
const NOT_THE_RUNTIMES: [&str; 19] = [
    "affinity",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "evictionResponders",
    "imagePullSecrets",
    "nodeName",
    "nodeSelector",
    "os",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "schedulerName",
    "schedulingGates",
    "schedulingGroup",
    "serviceAccount",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
];

/// Fields of the requests and files that this module does not make.
const NOT_IN_THE_REQUEST: [&str; 5] =
    ["ephemeralContainers", "hostAliases", "hostnameOverride", "setHostnameAsFQDN", "subdomain"];

const DEFAULT_GRACE_SECS: i64 = 30;

/// Bounds variables, command and arguments of a container in bytes, once each `$(NAME)` is
/// replaced: more than Linux passes to a program by default (`_STK_LIM / 4` is 2 MiB, of which each
/// text takes at least a pointer).
const MAX_EXPANDED_BYTES: u64 = 1024 * 1024;

/// Pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// `metadata`
    pub metadata: Metadata,
    /// Init containers, which run one after another.
    pub init_containers: Vec<Container>,
    /// Containers.
    pub containers: Vec<Container>,
    /// Volumes.
    pub volumes: Vec<Volume>,
    /// `hostNetwork`
    pub host_network: bool,
    /// `hostPID`
    pub host_pid: bool,
    /// `hostIPC`
    pub host_ipc: bool,
    /// `hostUsers`; `false` requests a user namespace of the pod.
    pub host_users: bool,
    /// `shareProcessNamespace`
    pub share_process_namespace: bool,
    /// `hostname`
    pub hostname: Option<String>,
    /// `runtimeClassName`, which is also its handler's name.
    pub runtime_class: Option<String>,
    /// `dnsPolicy`
    pub dns_policy: DnsPolicy,
    /// `dnsConfig`
    pub dns: Dns,
    /// `terminationGracePeriodSeconds`
    pub grace_secs: i64,
    /// `securityContext`
    pub security: PodSecurity,
    /// `overhead`
    pub overhead: Resources,
    /// `resources`: of the pod itself, without the API server's defaults.
    pub own_resources: Resources,
    /// Names of its `resourceClaims`.
    pub claims: Vec<String>,
    /// Workload that makes it; `None` for a Pod.
    pub workload: Option<Workload>,
}

impl Pod {
    /// Returns its QoS class.
    pub fn qos_class(&self) -> QosClass {
        let own = &self.own_resources;
        if own.is_empty() {
            return resources::class_of(
                self.all_containers().map(|container| &container.resources),
            );
        }
        // Limits of containers do not count beside those of the pod.
        let Resources { cpu_request, memory_request, .. } = self.resources();
        let own = Resources { cpu_request, memory_request, ..own.clone() };
        resources::class_of([&own].into_iter())
    }

    /// Returns its resources: its own, and else the most that run together, as the scheduler sums
    /// them (`PodRequests` and `PodLimits` of k8s.io/component-helpers). Sidecars run beside all
    /// that follows them.
    pub fn resources(&self) -> Resources {
        let (mut sidecars, mut init) = (Resources::default(), Resources::default());
        for container in &self.init_containers {
            let together = container.resources.plus(&sidecars);
            init = init.max(&together);
            if container.always_restarts {
                sidecars = together;
            }
        }
        self.containers
            .iter()
            .fold(sidecars, |sum, container| sum.plus(&container.resources))
            .max(&init)
            .of_pod(&self.own_resources)
    }

    /// Returns its resources without limits that leave a container out.
    pub fn complete_resources(&self) -> Resources {
        let all = |limit: fn(&Resources) -> Option<u64>| {
            limit(&self.own_resources).is_some()
                || self.all_containers().all(|container| limit(&container.resources).is_some())
        };
        let sums = self.resources();
        Resources {
            cpu_limit: sums.cpu_limit.filter(|_| all(|resources| resources.cpu_limit)),
            memory_limit: sums.memory_limit.filter(|_| all(|resources| resources.memory_limit)),
            ..sums
        }
    }

    /// Returns its init containers and containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> + Clone {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Reads a Pod.
    pub(super) fn read(mut document: Table<'_>) -> Option<Self> {
        let metadata = Metadata::read(&mut document);
        let spec = document.need("spec", "a table with containers");
        // `status` is the API server's.
        document.take("status");
        document.finish();
        Self::read_spec(metadata, spec?, Vec::new())
    }

    /// Reads a pod's `spec`. `claimed` are volumes that replace its own of the same names.
    pub(super) fn read_spec(
        metadata: Metadata,
        spec: Field<'_>,
        claimed: Vec<Volume>,
    ) -> Option<Self> {
        let mut spec = spec.table()?;
        let mut pod = Self::read_fields(metadata, &mut spec);
        let is_replaced =
            |volume: &Volume| claimed.iter().any(|claimed| claimed.name == volume.name);
        pod.volumes.retain(|volume| !is_replaced(volume));
        pod.volumes.extend(claimed);
        spec.ignore(&NOT_IN_THE_REQUEST);
        spec.ignore(&NOT_THE_RUNTIMES);
        pod.check(&spec);
        spec.finish();
        Some(pod)
    }

    fn read_fields(metadata: Metadata, spec: &mut Table<'_>) -> Self {
        let containers = |field: Option<Field<'_>>| -> Vec<Container> {
            let items = field.map(Field::items).unwrap_or_default();
            items.into_iter().filter_map(Container::read).collect()
        };
        let restarts = [("Always", ()), ("OnFailure", ()), ("Never", ())];
        let _restarts = spec.take("restartPolicy").and_then(|field| field.choice(&restarts));
        let _seconds = spec
            .take("activeDeadlineSeconds")
            .and_then(|field| field.number(1..=i64::from(i32::MAX)));
        let mut flag = |key| spec.take(key).and_then(Field::flag);
        let host_network = flag("hostNetwork").unwrap_or_default();
        let host_pid = flag("hostPID").unwrap_or_default();
        let host_ipc = flag("hostIPC").unwrap_or_default();
        let host_users = flag("hostUsers").unwrap_or(true);
        let share_process_namespace = flag("shareProcessNamespace").unwrap_or_default();
        Self {
            host_network,
            host_pid,
            host_ipc,
            host_users,
            share_process_namespace,
            init_containers: containers(spec.take("initContainers")),
            containers: containers(spec.need("containers", "a list of one or more")),
            volumes: spec
                .take("volumes")
                .map(|field| field.items().into_iter().filter_map(Volume::read).collect())
                .unwrap_or_default(),
            hostname: spec.take("hostname").and_then(dns_name),
            runtime_class: spec.take("runtimeClassName").and_then(dns_name),
            dns_policy: spec
                .take("dnsPolicy")
                .and_then(DnsPolicy::read)
                .unwrap_or(DnsPolicy::ClusterFirst),
            dns: spec.take("dnsConfig").and_then(Field::table).map(Dns::read).unwrap_or_default(),
            grace_secs: spec
                .take("terminationGracePeriodSeconds")
                .and_then(|field| field.number(0..=i64::MAX))
                .unwrap_or(DEFAULT_GRACE_SECS),
            security: spec
                .take("securityContext")
                .and_then(Field::table)
                .map(PodSecurity::read)
                .unwrap_or_default(),
            overhead: spec.take("overhead").map(Resources::read_overhead).unwrap_or_default(),
            own_resources: spec
                .take("resources")
                .and_then(Field::table)
                .map(Resources::read_as_given)
                .unwrap_or_default(),
            claims: spec
                .take("resourceClaims")
                .map(|field| field.items().into_iter().filter_map(claim).collect())
                .unwrap_or_default(),
            workload: None,
            metadata,
        }
    }

    /// Reports fields that contradict each other.
    fn check(&self, spec: &Table<'_>) {
        let note = |key: &str, value: &str, rule: &str| {
            spec.report().add(Problem::with_value(spec.path_of(key), value, rule))
        };
        if self.containers.is_empty() {
            note("containers", "[]", "is invalid; allowed: a list of one or more containers");
        }
        let mut names = BTreeSet::new();
        let volumes: BTreeSet<&str> =
            self.volumes.iter().map(|volume| volume.name.as_str()).collect();
        if volumes.len() < self.volumes.len() {
            note("volumes", "a list", "two volumes have the same name; allowed: unique names");
        }
        for container in self.all_containers() {
            if !names.insert(&container.name) {
                note(
                    "containers",
                    &container.name,
                    "two containers have this name; allowed: unique names",
                );
            }
            let bytes = container.expanded_bytes();
            if bytes > MAX_EXPANDED_BYTES {
                let rule = format!(
                    "has {bytes} bytes of variables, command and arguments once each $(NAME) is \
                     replaced; allowed: {MAX_EXPANDED_BYTES}"
                );
                note("containers", &container.name, &rule);
            }
            let mounts = container.mounts.iter().map(|mount| ("volumeMounts", &mount.name));
            let devices = container.devices.iter().map(|device| ("volumeDevices", &device.name));
            for (key, volume) in
                mounts.chain(devices).filter(|(_, volume)| !volumes.contains(volume.as_str()))
            {
                note(
                    &format!("containers.{}.{key}", container.name),
                    volume,
                    "is invalid; allowed: the name of a volume of the pod",
                );
            }
        }
    }
}

/// Reads the name of a resource claim.
fn claim(field: Field<'_>) -> Option<String> {
    let mut table = field.table()?;
    let name = table.need("name", "a DNS name").and_then(dns_name);
    table.ignore(&["resourceClaimName", "resourceClaimTemplateName"]);
    table.finish();
    name
}
