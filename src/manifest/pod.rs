//! Pods.

use std::collections::BTreeSet;

use super::{
    Container, Dns, Metadata, PodSecurity, QosClass, Resources, Volume, metadata::dns_name,
    resources, volume::Sources,
};
use crate::problems::{Field, Problem, Table};

/// Fields for the scheduler, the API server or the kubelet alone.
const NOT_THE_RUNTIMES: [&str; 17] = [
    "activeDeadlineSeconds",
    "affinity",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "nodeName",
    "nodeSelector",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "schedulerName",
    "schedulingGates",
    "serviceAccount",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
];

const DEFAULT_GRACE_SECS: i64 = 30;

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
    /// `restartPolicy`
    pub restart_policy: RestartPolicy,
    /// `terminationGracePeriodSeconds`
    pub grace_secs: i64,
    /// `securityContext`
    pub security: PodSecurity,
    /// `overhead`
    pub overhead: Resources,
}

/// `dnsPolicy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsPolicy {
    /// The cluster's DNS, unless the pod is on the node's network.
    ClusterFirst,
    /// The cluster's DNS.
    ClusterFirstWithHostNet,
    /// The node's resolv.conf.
    Default,
    /// `dnsConfig` alone.
    None,
}

/// `restartPolicy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// After any exit code.
    Always,
    /// After a failure.
    OnFailure,
    /// Never.
    Never,
}

impl Pod {
    /// Returns its QoS class.
    pub fn qos_class(&self) -> QosClass {
        resources::class_of(
            self.init_containers
                .iter()
                .chain(&self.containers)
                .map(|container| &container.resources),
        )
    }

    /// Returns its resources: the sum of its containers, or its largest init container.
    pub fn resources(&self) -> Resources {
        let together = self
            .containers
            .iter()
            .fold(Resources::default(), |sum, container| sum.plus(&container.resources));
        self.init_containers.iter().fold(together, |most, container| most.max(&container.resources))
    }

    pub(super) fn read(mut document: Table<'_>, sources: &Sources) -> Option<Self> {
        let metadata = Metadata::read(&mut document);
        let spec = document.need("spec", "a table with containers");
        // `status` is the API server's.
        document.take("status");
        document.finish();
        let mut spec = spec?.table()?;
        let pod = Self::read_spec(metadata, &mut spec, sources);
        for key in NOT_THE_RUNTIMES {
            spec.take(key);
        }
        pod.check(&spec);
        spec.finish();
        Some(pod)
    }

    fn read_spec(metadata: Metadata, spec: &mut Table<'_>, sources: &Sources) -> Self {
        let containers = |field: Option<Field<'_>>| -> Vec<Container> {
            field
                .map(|field| field.items().into_iter().filter_map(Container::read).collect())
                .unwrap_or_default()
        };
        let policies = [
            ("ClusterFirst", DnsPolicy::ClusterFirst),
            ("ClusterFirstWithHostNet", DnsPolicy::ClusterFirstWithHostNet),
            ("Default", DnsPolicy::Default),
            ("None", DnsPolicy::None),
        ];
        let restarts = [
            ("Always", RestartPolicy::Always),
            ("OnFailure", RestartPolicy::OnFailure),
            ("Never", RestartPolicy::Never),
        ];
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
                .map(|field| {
                    field
                        .items()
                        .into_iter()
                        .filter_map(|item| Volume::read(item, &metadata.namespace, sources))
                        .collect()
                })
                .unwrap_or_default(),
            hostname: spec.take("hostname").and_then(dns_name),
            runtime_class: spec.take("runtimeClassName").and_then(dns_name),
            dns_policy: spec
                .take("dnsPolicy")
                .and_then(|field| field.choice(&policies))
                .unwrap_or(DnsPolicy::ClusterFirst),
            dns: spec.take("dnsConfig").and_then(Field::table).map(dns_config).unwrap_or_default(),
            restart_policy: spec
                .take("restartPolicy")
                .and_then(|field| field.choice(&restarts))
                .unwrap_or(RestartPolicy::Always),
            grace_secs: spec
                .take("terminationGracePeriodSeconds")
                .and_then(|field| field.number(0..=i64::MAX))
                .unwrap_or(DEFAULT_GRACE_SECS),
            security: spec
                .take("securityContext")
                .and_then(Field::table)
                .map(PodSecurity::read)
                .unwrap_or_default(),
            overhead: spec.take("overhead").map(overhead).unwrap_or_default(),
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
        for container in self.init_containers.iter().chain(&self.containers) {
            if !names.insert(&container.name) {
                note(
                    "containers",
                    &container.name,
                    "two containers have this name; allowed: unique names",
                );
            }
            for mount in
                container.mounts.iter().filter(|mount| !volumes.contains(mount.name.as_str()))
            {
                note(
                    &format!("containers.{}.volumeMounts", container.name),
                    &mount.name,
                    "is invalid; allowed: the name of a volume of the pod",
                );
            }
        }
    }
}

fn dns_config(mut table: Table<'_>) -> Dns {
    let option = |field: Field<'_>| {
        let mut table = field.table()?;
        let name = table.need("name", "an option's name").and_then(Field::text);
        let value = table.take("value").and_then(Field::text);
        table.finish();
        Some(value.map_or(name.clone()?, |value| format!("{}:{value}", name.unwrap_or_default())))
    };
    let dns = Dns {
        servers: table.take("nameservers").map(Field::texts).unwrap_or_default(),
        searches: table.take("searches").map(Field::texts).unwrap_or_default(),
        options: table
            .take("options")
            .map(|field| field.items().into_iter().filter_map(option).collect())
            .unwrap_or_default(),
    };
    table.finish();
    dns
}

/// Returns requests equal to limits.
fn overhead(field: Field<'_>) -> Resources {
    field.table().map(|table| Resources::read_overhead(table)).unwrap_or_default()
}
