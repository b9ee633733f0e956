//! Backend of type `milpa`: pods in cells.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use kiyot_values::problems::{Field, Problem, Report, Table};

use super::{
    Ec2, GatewayListen, Limits, LocalMachine, Netns, Placement, Qemu, WarmPool,
    backends::CONTAINERD_SOCKET, read,
};

const STATE_DIR: &str = "/var/lib/kiyot";
const MAX_CELLS: usize = 250;
/// Highest value of `max_cells`.
pub const MAX_CELLS_LIMIT: usize = 10_000;
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(15 * 60);
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(90);
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(2 * 60);
const TOKEN_TTL: Duration = Duration::from_secs(10 * 60);
/// Timeouts of cloud instances, which boot in minutes and may install packages.
const CLOUD_LAUNCH_TIMEOUT: Duration = Duration::from_secs(10 * 60);
const CLOUD_TOKEN_TTL: Duration = Duration::from_secs(20 * 60);
const IMAGE_PULL_PROGRESS_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// About half of a network with a gigabit a second.
const IMAGE_BYTES_PER_SECOND: u64 = 64 << 20;
/// Range of a limit of these bytes: a cell waits a minute for the next part of a blob, and hundreds
/// of blobs may share the limit.
const IMAGE_BYTES_PER_SECOND_RANGE: RangeInclusive<u64> = (8 << 20)..=(16 << 30);
/// Range of all durations above except `healthy_timeout`.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Shortest `healthy_timeout`: an agent that was killed, or that reconnects to a restarted daemon,
/// is back within this time.
const MIN_HEALTHY_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest name of a cluster or a node, in bytes: that of a Kubernetes node.
const MAX_OWNER_NAME_BYTES: usize = 253;
/// Namespace of containerd's CRI plugin.
const NODE_NAMESPACE: &str = "k8s.io";
const KUBELET_DIR: &str = "/var/lib/kubelet";

/// Providers by name. A program that was built without a provider reports this at its start.
pub const PROVIDERS: &[(&str, ProviderKind)] =
    &[("netns", ProviderKind::Netns), ("qemu", ProviderKind::Qemu), ("ec2", ProviderKind::Ec2)];

/// Pods in cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MilpaBackend {
    /// Directory of the store and of all cells of this node, for the daemon alone (mode 0700).
    pub state_dir: PathBuf,
    /// Providers of cells, in the order in which equal offerings are preferred. Not empty.
    pub providers: Vec<ProviderKind>,
    /// Providers that a reload has removed and that still have cells. Set by the daemon, never by a
    /// file.
    pub draining: Vec<ProviderKind>,
    /// Name of the cluster, for the tags of instances.
    pub cluster: Option<String>,
    /// Name of the node, for the tags of instances; by default the host name.
    pub node: Option<String>,
    /// Limit of concurrent cells.
    pub max_cells: usize,
    /// Bytes that a pod may use on its cell's disk: writable layers, emptyDirs and logs. 0 is no
    /// limit.
    pub ephemeral_storage_limit: u64,
    /// Time without contact to the daemon after which a cell ends itself.
    pub orphan_timeout: Duration,
    /// Time for which a cell's agent may be silent before the cell is lost. Zero is no limit.
    pub healthy_timeout: Duration,
    /// Time from a cell's launch to its enrolment.
    pub launch_timeout: Duration,
    /// Validity of a launch's one-time token.
    pub token_ttl: Duration,
    /// Time without progress after which a pull of an image fails.
    pub image_pull_progress_timeout: Duration,
    /// Source of the images of cells.
    pub image_source: ImageSource,
    /// Bytes a second of the images that the node sends to cells on other machines. 0 is no limit.
    pub image_bytes_per_second: u64,
    /// Socket of the node's containerd, from which images are copied. By default that of the node's
    /// backend.
    pub node_containerd: PathBuf,
    /// Namespace of the node's images in containerd.
    pub node_namespace: String,
    /// Image of sandbox containers in cells. By default that of the node's runtime.
    pub pause_image: Option<String>,
    /// Directory of `HOST/hosts.toml` files for pulls in cells. By default the mirrors of the
    /// node's containerd.
    pub registry_config_dir: Option<PathBuf>,
    /// The kubelet's `--root-dir`.
    pub kubelet_dir: PathBuf,
    /// Policy of host access.
    pub policy: Policy,
    /// Limits of boots and prices.
    pub limits: Limits,
    /// Choice of instances for pods.
    pub placement: Placement,
    /// Pools of cells that wait for pods.
    pub warm: Vec<WarmPool>,
    /// TCP port that cells on other machines dial.
    pub gateway: GatewayListen,
    /// Settings of the provider `netns`.
    pub netns: Netns,
    /// Settings of the provider `qemu`.
    pub qemu: Qemu,
    /// Settings of the provider `ec2`.
    pub ec2: Ec2,
}

/// Provider of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProviderKind {
    /// `netns`: namespaces of this node.
    Netns,
    /// `qemu`: virtual machines of this node.
    Qemu,
    /// `ec2`: instances of Amazon EC2.
    Ec2,
}

impl ProviderKind {
    /// Returns the name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Netns => "netns",
            Self::Qemu => "qemu",
            Self::Ec2 => "ec2",
        }
    }

    /// Returns the provider of a name.
    pub fn named(name: &str) -> Option<Self> {
        PROVIDERS.iter().find(|(known, _)| *known == name).map(|(_, provider)| *provider)
    }

    /// Returns whether the provider's cells are on other machines than the daemon.
    pub fn has_remote_cells(self) -> bool {
        match self {
            Self::Netns | Self::Qemu => false,
            Self::Ec2 => true,
        }
    }
}

/// Policy for pods that request access to their host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Paths of the node.
    pub host_path: HostPath,
    /// The node's network (`hostNetwork`).
    pub host_network: HostAccessPolicy,
    /// The node's processes (`hostPID`).
    pub host_pid: HostAccessPolicy,
    /// The node's IPC (`hostIPC`).
    pub host_ipc: HostAccessPolicy,
    /// A user namespace of the pod (`hostUsers: false`).
    pub host_users: HostAccessPolicy,
    /// Privileged containers.
    pub privileged: Privileged,
    /// Name servers that only the node reaches.
    pub node_resolver: NodeResolver,
}

/// Source of the images of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageSource {
    /// `auto`: the registry for cells on other machines, the node for cells on it.
    Auto,
    /// `node`: the node sends the images and layers that it has, the registry has the rest.
    Node,
    /// `registry`: cells pull, and the node sends an image that can't be pulled.
    Registry,
}

/// Treatment of a mounted path of the node that is not a volume of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostPath {
    /// `refuse`: the container is refused, and the error names the path.
    Refuse,
    /// `copy-read-only`: the cell gets a copy that the container can't write to.
    CopyReadOnly,
}

/// Treatment of a pod that requests access to its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostAccessPolicy {
    /// `refuse`: the pod is refused.
    Refuse,
    /// `keep-local`: the pod runs on the node.
    KeepLocal,
    /// `cell`: the pod gets the cell's own, if the provider's cells have it; otherwise it is
    /// refused.
    Cell,
}

/// Treatment of a privileged container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileged {
    /// `refuse`: the container is refused. In a cell that shares the node's kernel it would be root
    /// on the node.
    Refuse,
    /// `keep-local`: its pod runs on the node.
    KeepLocal,
    /// `cell`: the container is privileged in its cell, if the provider's cells contain privileges;
    /// otherwise it is refused.
    Cell,
    /// `allow`: the container runs in the cell, even if its privileges reach the node.
    Allow,
}

/// Treatment of name servers whose addresses mean another machine in a cell: loopback, link-local,
/// unspecified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeResolver {
    /// `refuse`: the pod is refused, and the error names the address.
    Refuse,
    /// `forward`: the daemon forwards queries of the cell.
    Forward,
    /// `allow`: the cell gets the addresses unchanged. Suitable if cells reach them, such as a
    /// link-local cache on the node for cells in its namespaces.
    Allow,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            host_path: HostPath::Refuse,
            host_network: HostAccessPolicy::Refuse,
            host_pid: HostAccessPolicy::Refuse,
            host_ipc: HostAccessPolicy::Refuse,
            host_users: HostAccessPolicy::Refuse,
            privileged: Privileged::Refuse,
            node_resolver: NodeResolver::Refuse,
        }
    }
}

impl Default for MilpaBackend {
    fn default() -> Self {
        Self {
            state_dir: STATE_DIR.into(),
            providers: vec![ProviderKind::Netns],
            draining: Vec::new(),
            cluster: None,
            node: None,
            max_cells: MAX_CELLS,
            ephemeral_storage_limit: 0,
            orphan_timeout: ORPHAN_TIMEOUT,
            healthy_timeout: HEALTHY_TIMEOUT,
            launch_timeout: LAUNCH_TIMEOUT,
            token_ttl: TOKEN_TTL,
            image_pull_progress_timeout: IMAGE_PULL_PROGRESS_TIMEOUT,
            image_source: ImageSource::Auto,
            image_bytes_per_second: IMAGE_BYTES_PER_SECOND,
            node_containerd: CONTAINERD_SOCKET.into(),
            node_namespace: NODE_NAMESPACE.into(),
            pause_image: None,
            registry_config_dir: None,
            kubelet_dir: KUBELET_DIR.into(),
            policy: Policy::default(),
            limits: Limits::default(),
            placement: Placement::default(),
            warm: Vec::new(),
            gateway: GatewayListen::default(),
            netns: Netns::default(),
            qemu: Qemu::default(),
            ec2: Ec2::default(),
        }
    }
}

impl MilpaBackend {
    /// Returns the time for which a cell's agent may be silent; `None` for no limit.
    pub fn healthy_limit(&self) -> Option<Duration> {
        (!self.healthy_timeout.is_zero()).then_some(self.healthy_timeout)
    }

    /// Returns whether a provider is configured.
    pub fn has(&self, provider: ProviderKind) -> bool {
        self.providers.contains(&provider)
    }

    /// Returns whether a provider makes cells on other machines than the daemon.
    pub fn has_remote_cells(&self) -> bool {
        self.providers.iter().any(|provider| provider.has_remote_cells())
    }

    /// Returns the part of this node that a provider's cells may have; `None` for cells on other
    /// machines.
    pub fn machine_of(&self, provider: ProviderKind) -> Option<LocalMachine> {
        match provider {
            ProviderKind::Netns => Some(self.netns.machine),
            ProviderKind::Qemu => Some(self.qemu.machine),
            ProviderKind::Ec2 => None,
        }
    }

    /// Returns the memory in bytes that a cell's own processes need beside its pod.
    pub fn memory_overhead_of(&self, provider: ProviderKind) -> u64 {
        match provider {
            ProviderKind::Netns => self.netns.memory_overhead,
            ProviderKind::Qemu => self.qemu.memory_overhead,
            ProviderKind::Ec2 => self.ec2.memory_overhead(),
        }
    }

    pub(super) fn read(mut table: Table<'_>) -> Self {
        // An empty path means absent, until `checks::complete` sets the node backend's.
        let mut backend = Self { node_containerd: PathBuf::new(), ..Self::default() };
        table.set("state_dir", &mut backend.state_dir, read::path);
        let (one, several) = (table.take("provider"), table.take("providers"));
        if let (Some(one), Some(_)) = (&one, &several) {
            one.refuse("excludes providers; allowed: one of the two");
        }
        let one = one.and_then(|field| field.choice(PROVIDERS)).map(|one| vec![one]);
        let several = several.and_then(|field| providers(field, table.report()));
        backend.providers = one.or(several).unwrap_or(backend.providers);
        if backend.has_remote_cells() {
            backend.launch_timeout = CLOUD_LAUNCH_TIMEOUT;
            backend.token_ttl = CLOUD_TOKEN_TTL;
        }
        table.set("cluster", &mut backend.cluster, |field| owner_name(field).map(Some));
        table.set("node", &mut backend.node, |field| owner_name(field).map(Some));
        table.set("max_cells", &mut backend.max_cells, |field| field.number(1..=MAX_CELLS_LIMIT));
        table.set("ephemeral_storage_limit", &mut backend.ephemeral_storage_limit, read::bytes);
        for (key, target) in [
            ("orphan_timeout", &mut backend.orphan_timeout),
            ("launch_timeout", &mut backend.launch_timeout),
            ("token_ttl", &mut backend.token_ttl),
            ("image_pull_progress_timeout", &mut backend.image_pull_progress_timeout),
        ] {
            table.set(key, target, |field| read::duration(field, MIN_TIMEOUT..=MAX_TIMEOUT));
        }
        table.set("healthy_timeout", &mut backend.healthy_timeout, |field| {
            read::duration_or_zero(field, MIN_HEALTHY_TIMEOUT..=MAX_TIMEOUT)
        });
        table.set("image_source", &mut backend.image_source, |field| {
            field.choice(&[
                ("auto", ImageSource::Auto),
                ("node", ImageSource::Node),
                ("registry", ImageSource::Registry),
            ])
        });
        table.set("image_bytes_per_second", &mut backend.image_bytes_per_second, |field| {
            read::bytes_or_zero_in(field, "from \"8Mi\" to \"16Gi\"", IMAGE_BYTES_PER_SECOND_RANGE)
        });
        table.set("node_containerd", &mut backend.node_containerd, read::socket);
        table.set("node_namespace", &mut backend.node_namespace, |field| {
            word(field, "a namespace of containerd, such as \"k8s.io\"")
        });
        table.set("pause_image", &mut backend.pause_image, |field| {
            word(field, "the name of an image").map(Some)
        });
        table.set("registry_config_dir", &mut backend.registry_config_dir, |field| {
            read::path(field).map(Some)
        });
        table.set("kubelet_dir", &mut backend.kubelet_dir, read::path);
        if let Some(policy) = table.take("policy").and_then(|field| field.table()) {
            backend.policy = Policy::read(policy);
        }
        if let Some(limits) = table.take("limits").and_then(|field| field.table()) {
            backend.limits = Limits::read(limits);
        }
        if let Some(placement) = table.take("placement").and_then(|field| field.table()) {
            backend.placement = Placement::read(placement);
        }
        table.set("warm", &mut backend.warm, |field| {
            let pools = field.items().into_iter().filter_map(|item| item.table());
            Some(pools.map(WarmPool::read).collect())
        });
        if let Some(gateway) = table.take("gateway").and_then(|field| field.table()) {
            backend.gateway = GatewayListen::read(gateway);
        }
        if let Some(netns) = table.take("netns").and_then(|field| field.table()) {
            backend.netns = Netns::read(netns);
        }
        if let Some(qemu) = table.take("qemu").and_then(|field| field.table()) {
            backend.qemu = Qemu::read(qemu);
        }
        if let Some(ec2) = table.take("ec2").and_then(|field| field.table()) {
            backend.ec2 = Ec2::read(ec2);
        }
        table.finish();
        backend
    }
}

impl Policy {
    fn read(mut table: Table<'_>) -> Self {
        let mut policy = Self::default();
        table.set("host_path", &mut policy.host_path, |field| {
            field
                .choice(&[("refuse", HostPath::Refuse), ("copy-read-only", HostPath::CopyReadOnly)])
        });
        for (key, target) in [
            ("host_network", &mut policy.host_network),
            ("host_pid", &mut policy.host_pid),
            ("host_ipc", &mut policy.host_ipc),
            ("host_users", &mut policy.host_users),
        ] {
            table.set(key, target, |field| {
                field.choice(&[
                    ("refuse", HostAccessPolicy::Refuse),
                    ("keep-local", HostAccessPolicy::KeepLocal),
                    ("cell", HostAccessPolicy::Cell),
                ])
            });
        }
        table.set("privileged", &mut policy.privileged, |field| {
            field.choice(&[
                ("refuse", Privileged::Refuse),
                ("keep-local", Privileged::KeepLocal),
                ("cell", Privileged::Cell),
                ("allow", Privileged::Allow),
            ])
        });
        let resolvers = [
            ("refuse", NodeResolver::Refuse),
            ("forward", NodeResolver::Forward),
            ("allow", NodeResolver::Allow),
        ];
        table.set("node_resolver", &mut policy.node_resolver, |field| field.choice(&resolvers));
        table.finish();
        policy
    }
}

/// Reads a list of providers. Providers of cells on the node exclude each other, because they share
/// its state directory and its network.
fn providers(field: Field<'_>, report: &Report) -> Option<Vec<ProviderKind>> {
    let at = field.at().to_owned();
    let providers: Vec<ProviderKind> =
        field.items().into_iter().filter_map(|item| item.choice(PROVIDERS)).collect();
    let local = providers.iter().filter(|provider| !provider.has_remote_cells()).count();
    if providers.is_empty() || local > 1 || providers.len() - local > 1 {
        let rule = "is empty, has several of cells on the node, or repeats one; allowed: \
                    \"netns\" or \"qemu\", \"ec2\", or one of the first two and \"ec2\", in the \
                    order in which equal offerings are preferred";
        report.add(Problem::new(at, rule));
        return None;
    }
    Some(providers)
}

/// Reads the name of a cluster or a node, which is the value of a tag.
fn owner_name(field: Field<'_>) -> Option<String> {
    let allowed = format!(
        "1 to {MAX_OWNER_NAME_BYTES} letters, digits, \".\", \"-\" and \"_\", as \"worker-1\""
    );
    field.read(&allowed, |text| {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let has_length = (1..=MAX_OWNER_NAME_BYTES).contains(&text.len());
        (has_length && text.chars().all(is_allowed)).then(|| text.to_owned())
    })
}

/// Reads a text without white space.
fn word(field: Field<'_>, allowed: &str) -> Option<String> {
    field.read(allowed, |text| {
        (!text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control()))
            .then(|| text.to_owned())
    })
}
