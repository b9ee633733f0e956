//! Pods.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1 as api;
use kiyot_values::names::is_gpu;

use super::{
    Container, Dns, DnsPolicy, Metadata, QosClass, Resources, Volume, Workload, metadata::dns_name,
    place::Place, resources, security,
};

const DEFAULT_GRACE_SECS: i64 = 30;

/// Most bytes of a container's variables, command and arguments after each `$(NAME)` is replaced.
/// Linux's default limit for a program is 2 MiB (`_STK_LIM / 4`), with a pointer for each text.
const MAX_EXPANDED_BYTES: u64 = 1024 * 1024;

/// Pod.
#[derive(Debug, Clone, PartialEq)]
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
    /// `runtimeClassName`, which is also the handler's name.
    pub runtime_class: Option<String>,
    /// `dnsPolicy`
    pub dns_policy: DnsPolicy,
    /// `dnsConfig`
    pub dns: Dns,
    /// `terminationGracePeriodSeconds`
    pub grace_secs: i64,
    /// `securityContext`
    pub security: api::PodSecurityContext,
    /// `overhead`
    pub overhead: Resources,
    /// `resources` of the pod itself, without the API server's defaults.
    pub own_resources: Resources,
    /// Names of the pod's `resourceClaims`.
    pub claims: Vec<String>,
    /// Workload that creates the pod; `None` for a Pod.
    pub workload: Option<Workload>,
    /// Notes on fields that Kubernetes does not know, with their places.
    pub notes: Vec<String>,
}

impl Pod {
    /// Returns the pod's QoS class.
    pub fn qos_class(&self) -> QosClass {
        let own = &self.own_resources;
        if own.is_empty() {
            return resources::class_of(
                self.all_containers().map(|container| &container.resources),
            );
        }
        // If the pod has limits, its containers' limits do not count.
        let Resources { cpu_request, memory_request, .. } = self.resources();
        let own = Resources { cpu_request, memory_request, ..own.clone() };
        resources::class_of([&own].into_iter())
    }

    /// Returns the pod's resources: its own, or otherwise the largest sum of containers that run
    /// together, as in the scheduler (`PodRequests` and `PodLimits` of k8s.io/component-helpers). A
    /// sidecar runs beside all containers that follow it.
    pub fn resources(&self) -> Resources {
        self.sum(Resources::clone)
    }

    fn sum(&self, of: fn(&Resources) -> Resources) -> Resources {
        let (mut sidecars, mut init) = (Resources::default(), Resources::default());
        for container in &self.init_containers {
            let together = of(&container.resources).plus(&sidecars);
            init = init.max(&together);
            if container.always_restarts {
                sidecars = together;
            }
        }
        self.containers
            .iter()
            .fold(sidecars, |sum, container| sum.plus(&of(&container.resources)))
            .max(&init)
            .of_pod(&self.own_resources)
    }

    /// Returns the pod's resources without limits that some container lacks, and with the requests
    /// that extended resources imply.
    pub fn complete_resources(&self) -> Resources {
        let all = |limit: fn(&Resources) -> Option<u64>| {
            limit(&self.own_resources).is_some()
                || self.all_containers().all(|container| limit(&container.resources).is_some())
        };
        let sums = self.sum(Resources::with_extended);
        Resources {
            cpu_limit: sums.cpu_limit.filter(|_| all(|resources| resources.cpu_limit)),
            memory_limit: sums.memory_limit.filter(|_| all(|resources| resources.memory_limit)),
            ..sums
        }
    }

    /// Returns the name of the pod's first GPU resource.
    pub fn gpus(&self) -> Option<String> {
        let mut extended = self.resources().extended.into_iter();
        extended.find(|(name, amount)| *amount > 0 && is_gpu(name)).map(|(name, _)| name)
    }

    /// Returns the init containers and containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> + Clone {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Reads a Pod.
    pub(super) fn read(at: &Place<'_>, pod: api::Pod) -> Option<Self> {
        let metadata = Metadata::read(&at.of("metadata"), pod.metadata);
        Self::read_spec(metadata, &at.of("spec"), pod.spec, Vec::new())
    }

    /// Reads a pod's `spec`. `claimed` are volumes that replace the pod's volumes of the same
    /// names.
    pub(super) fn read_spec(
        metadata: Metadata,
        at: &Place<'_>,
        spec: Option<api::PodSpec>,
        claimed: Vec<Volume>,
    ) -> Option<Self> {
        let Some(spec) = spec else {
            at.report("is missing; allowed: a table with containers");
            return None;
        };
        let mut pod = Self::read_fields(metadata, at, spec);
        let is_replaced =
            |volume: &Volume| claimed.iter().any(|claimed| claimed.name == volume.name);
        pod.volumes.retain(|volume| !is_replaced(volume));
        pod.volumes.extend(claimed);
        pod.check(at);
        Some(pod)
    }

    fn read_fields(metadata: Metadata, at: &Place<'_>, spec: api::PodSpec) -> Self {
        let restarts = [("Always", ()), ("OnFailure", ()), ("Never", ())];
        at.take("restartPolicy", spec.restart_policy).and_then(|field| field.choice(&restarts));
        at.take("activeDeadlineSeconds", spec.active_deadline_seconds)
            .and_then(|field| field.number(1..=i64::from(i32::MAX)));
        let claim = |at: Place<'_>, claim: api::PodResourceClaim| {
            at.need("name", Some(claim.name), "a DNS name").and_then(dns_name)
        };
        Self {
            host_network: spec.host_network.unwrap_or_default(),
            host_pid: spec.host_pid.unwrap_or_default(),
            host_ipc: spec.host_ipc.unwrap_or_default(),
            host_users: spec.host_users.unwrap_or(true),
            share_process_namespace: spec.share_process_namespace.unwrap_or_default(),
            init_containers: at.items("initContainers", spec.init_containers, Container::read),
            containers: at.items("containers", Some(spec.containers), Container::read),
            volumes: at.items("volumes", spec.volumes, Volume::read),
            hostname: at.take("hostname", spec.hostname).and_then(dns_name),
            runtime_class: at.take("runtimeClassName", spec.runtime_class_name).and_then(dns_name),
            dns_policy: at
                .take("dnsPolicy", spec.dns_policy)
                .and_then(DnsPolicy::read)
                .unwrap_or(DnsPolicy::ClusterFirst),
            dns: Dns::read(spec.dns_config.unwrap_or_default()),
            // The API server treats a negative time as one second.
            grace_secs: match spec.termination_grace_period_seconds {
                Some(..0) => 1,
                given => given.unwrap_or(DEFAULT_GRACE_SECS),
            },
            security: spec.security_context.unwrap_or_default(),
            overhead: Resources::read_overhead(
                &at.of("overhead"),
                &spec.overhead.unwrap_or_default(),
            ),
            own_resources: Resources::read_as_given(
                &at.of("resources"),
                spec.resources.unwrap_or_default(),
            ),
            claims: at.items("resourceClaims", spec.resource_claims, claim),
            workload: None,
            notes: Vec::new(),
            metadata,
        }
    }

    /// Reports fields that are not allowed or contradict each other.
    fn check(&self, at: &Place<'_>) {
        security::check_pod(&at.of("securityContext"), &self.security);
        let note = |key: &str, value: &str, rule: &str| at.of(key).refuse(value, rule);
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
