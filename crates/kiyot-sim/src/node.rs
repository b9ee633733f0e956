//! The node of a simulation: the configuration of the daemon.

use std::{sync::Arc, time::Duration};

use kiyot_config::{MilpaBackend, ProviderKind, WarmPool};
use kiyot_engine::{
    engine::{Limits, Pool, ProviderKey},
    placement::{
        Candidate, Catalogue, Choice, Defaults, Market, Needs, NodeShare, Offering, Requested,
        Rules, Size, rank, rank_further,
    },
    request::{Architecture, CellRequest},
};

use crate::{
    Workload,
    cloud::{CAPABILITIES, SECOND, SimCloud, ZONES},
    daemon::HEALTHY_TIMEOUT,
    rng::{Quantiles, Rng},
};

/// The limit of the time from an order to its bound cell, on a random node.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(300);
/// The lowest limits of cells and boots, on a random node with limits.
const FEW_CELLS: usize = 8;
const FEW_BOOTS: usize = 2;
/// The pods of a random day for each allowed cell, and for each allowed boot at a time.
const PODS_OF_A_CELL: usize = 80;
const PODS_OF_A_BOOT: usize = 1500;
/// The least and the most seconds that pods of a random node wait for spot.
const SPOT_DEADLINE: (u64, u64) = (0, 120);
/// The most pools of a random node.
const MAX_POOLS: usize = 2;
/// The most cells of a random pool.
pub(super) const MAX_COUNT: usize = 3;
/// The least and the most offerings of a random pool.
const POOL_CANDIDATES: (usize, usize) = (1, 4);
/// The age at which the cells of a random pool are replaced, in seconds.
const POOL_TTL: (u64, u64) = (300, 7200);

/// The zone of cells on the node. No other offering has it.
const ON_NODE: &str = "this node";
/// The median time from the launch of a cell on the node to its agent's connection, in a debug
/// build. A release build is faster.
const BOOT_ON_NODE: Duration = Duration::from_secs(1);

/// The configuration of a simulated node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The instance types of the cloud.
    pub catalogue: Arc<Catalogue>,
    /// The rules for choosing an instance type.
    pub rules: Arc<Rules>,
    /// The providers, in the configured order: the cloud, cells on the node, or both.
    pub providers: Vec<ProviderKey>,
    /// The cells on the node, if a provider makes them.
    pub on_node: Option<OnNode>,
    /// The limits of launches.
    pub limits: Limits,
    /// The limit of the time from an order to its bound cell.
    pub launch_timeout: Duration,
    /// The time for which an agent may be silent; `None`: no limit.
    pub healthy_timeout: Option<Duration>,
    /// The time that a pod that prefers spot waits for spot.
    pub spot_deadline: Duration,
    /// The warm pools.
    pub pools: Vec<WarmPool>,
    /// The median time from a launch to the agent's connection.
    pub boot: Duration,
}

/// The cells on a simulated node.
#[derive(Debug, Clone)]
pub struct OnNode {
    provider: ProviderKey,
    catalogue: Arc<Catalogue>,
    rules: Arc<Rules>,
    /// The part of the node that cells may use; `None`: no limit.
    pub(super) machine: Option<NodeShare>,
}

impl OnNode {
    /// Returns the cells on a node of this size, or `None` for a provider of other machines.
    fn of(config: &MilpaBackend, kind: ProviderKind, size: Size) -> Option<Self> {
        let name = kind.name();
        let catalogue = match kind {
            ProviderKind::Netns => Catalogue::any_size(Offering {
                instance_type: name.to_owned(),
                zone: ON_NODE.to_owned(),
                market: Market::OnDemand,
            }),
            ProviderKind::Qemu => {
                Catalogue::sized(name, ON_NODE, size, Needs::default().architecture)
            }
            ProviderKind::Ec2 => return None,
        };
        let machine = || {
            let milli_cpus = u64::from(size.cpus) * 1000;
            Some(NodeShare { milli_cpus, memory_mib: size.memory_mib })
        };
        Some(Self {
            provider: name,
            catalogue: Arc::new(catalogue),
            rules: Arc::new(Rules::of(config, kind)),
            machine: NodeShare::for_cells(config, kind, machine),
        })
    }
}

impl NodeOptions {
    /// Returns the node of a configured backend. Without a size of the node, all cells are
    /// instances of the catalogue, whatever their provider.
    pub fn of(
        config: &MilpaBackend,
        catalogue: Arc<Catalogue>,
        boot: Duration,
        size: Option<Size>,
    ) -> Self {
        let kinds = &config.providers;
        let on_node = |kind: &ProviderKind| size.and_then(|size| OnNode::of(config, *kind, size));
        let key = |kind| on_node(kind).map_or(CAPABILITIES.provider, |it| it.provider);
        let of_cloud = kinds.iter().find(|kind| on_node(kind).is_none());
        let of_cloud = of_cloud.copied().unwrap_or(ProviderKind::Ec2);
        let mut providers: Vec<ProviderKey> = kinds.iter().map(key).collect();
        // Without a size, both providers have the catalogue.
        providers.dedup();
        Self {
            catalogue,
            rules: Arc::new(Rules::of(config, of_cloud)),
            providers,
            on_node: kinds.iter().find_map(on_node),
            limits: Limits::of(config),
            launch_timeout: config.launch_timeout,
            healthy_timeout: config.healthy_limit(),
            spot_deadline: config.placement.spot_deadline,
            pools: config.warm.clone(),
            boot,
        }
    }
}

/// The node of a simulation.
#[derive(Debug)]
pub(super) struct Node {
    providers: Vec<ProviderKey>,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) rules: Arc<Rules>,
    pub(super) on_node: Option<OnNode>,
    pub(super) limits: Limits,
    pub(super) launch_timeout: Duration,
    pub(super) healthy_timeout: Option<Duration>,
    pub(super) spot_deadline: Duration,
    pub(super) pools: Vec<Pool>,
    /// The boot times of all cloud instances; `None`: the boot times of their types.
    boot: Option<Quantiles>,
}

impl Node {
    /// Returns the keys of the providers.
    pub(super) fn providers(&self) -> Vec<ProviderKey> {
        self.providers.clone()
    }

    /// Returns the provider of an offering. With two providers, the last zone is the second
    /// provider's.
    pub(super) fn provider_of(&self, offering: &Offering) -> ProviderKey {
        let is_second =
            self.providers.contains(&SECOND) && ZONES.last() == Some(&offering.zone.as_str());
        match &self.on_node {
            Some(on_node) if offering.zone == ON_NODE => on_node.provider,
            _ if is_second => SECOND,
            _ => CAPABILITIES.provider,
        }
    }

    /// Returns the cells on the node if this provider makes them.
    pub(super) fn on_node_of(&self, provider: ProviderKey) -> Option<&OnNode> {
        self.on_node.as_ref().filter(|on_node| on_node.provider == provider)
    }

    /// Returns a pod's choice among a provider's offerings.
    pub(super) fn choice(&self, provider: ProviderKey, needs: &Arc<Needs>) -> Choice {
        let (catalogue, rules) = match self.on_node_of(provider) {
            Some(on_node) => (&on_node.catalogue, &on_node.rules),
            None => (&self.catalogue, &self.rules),
        };
        let (catalogue, rules) = (Arc::clone(catalogue), Arc::clone(rules));
        let overhead_mib = needs.overhead_mib.max(rules.defaults.overhead_mib);
        let needs = match overhead_mib == needs.overhead_mib {
            true => Arc::clone(needs),
            false => Arc::new(Needs { overhead_mib, ..Needs::clone(needs) }),
        };
        Choice { catalogue, needs, rules }
    }

    /// Returns the needs of a pod, without the memory that the cell itself needs.
    pub(super) fn needs(&self, request: &CellRequest) -> Needs {
        let defaults = Defaults { overhead_mib: 0, ..self.rules.defaults };
        Needs::new(request, &Requested::default(), &defaults)
    }

    /// Returns the node of a workload.
    pub(super) fn of(workload: &Workload, rng: &Rng) -> Self {
        match workload {
            Workload::Random { pods, .. } => Self::random(*pods as usize, rng),
            Workload::Known { node, .. } => Self::configured(node),
        }
    }

    fn random(pods: usize, rng: &Rng) -> Self {
        let catalogue = SimCloud::catalogue();
        let offerings: Vec<Candidate> = catalogue.candidates().collect();
        let pools = (0..rng.below(MAX_POOLS + 1)).map(|number| {
            let mut candidates = offerings.clone();
            rng.shuffle(&mut candidates);
            let (least, most) = POOL_CANDIDATES;
            candidates.truncate(least + rng.below(most - least + 1));
            Pool {
                name: format!("pool-{number}").into(),
                provider: CAPABILITIES.provider,
                share: NodeShare::default(),
                machine: Architecture::Amd64.to_string(),
                count: rng.below(MAX_COUNT + 1),
                ttl: rng.seconds(POOL_TTL.0, POOL_TTL.1),
                candidates: Some(candidates),
                further: Vec::new(),
            }
        });
        let mut pools: Vec<Pool> = pools.collect();
        let has_two_providers = rng.once_in(2);
        for pool in pools.iter_mut().filter(|_| has_two_providers) {
            let is_second = rng.once_in(2);
            let is_own =
                |it: &Candidate| (ZONES.last() == Some(&it.offering.zone.as_str())) == is_second;
            let own = offerings.iter().filter(|it| is_own(it)).take(POOL_CANDIDATES.1);
            pool.candidates = Some(own.cloned().collect());
            pool.provider = if is_second { SECOND } else { CAPABILITIES.provider };
        }
        let max_cells = if rng.once_in(3) { FEW_CELLS.max(pods / PODS_OF_A_CELL) } else { 1000 };
        let boots = rng.once_in(3).then_some(FEW_BOOTS.max(pods / PODS_OF_A_BOOT));
        let second = has_two_providers.then_some(SECOND);
        Self {
            providers: [CAPABILITIES.provider].into_iter().chain(second).collect(),
            catalogue: Arc::new(catalogue),
            rules: Arc::default(),
            on_node: None,
            limits: Limits { max_cells, boots, ..Limits::default() },
            launch_timeout: LAUNCH_TIMEOUT,
            healthy_timeout: Some(HEALTHY_TIMEOUT),
            spot_deadline: rng.seconds(SPOT_DEADLINE.0, SPOT_DEADLINE.1),
            pools,
            boot: None,
        }
    }

    fn configured(options: &NodeOptions) -> Self {
        let NodeOptions { catalogue, rules, limits, providers, on_node, .. } = options.clone();
        let NodeOptions { launch_timeout, healthy_timeout, spot_deadline, .. } = *options;
        let mut node = Self {
            providers,
            catalogue,
            rules,
            on_node,
            limits,
            launch_timeout,
            healthy_timeout,
            spot_deadline,
            pools: Vec::new(),
            boot: Some(Quantiles::of_boots(options.boot)),
        };
        node.pools = options.pools.iter().filter_map(|pool| node.pool(pool)).collect();
        node
    }

    /// Returns a warm pool of its provider, or of the first provider.
    fn pool(&self, pool: &WarmPool) -> Option<Pool> {
        let is_own = |key: &&ProviderKey| {
            pool.provider.is_none_or(|kind| match self.on_node_of(key) {
                Some(on_node) => on_node.provider == kind.name(),
                None => self.on_node.as_ref().is_none_or(|it| it.provider != kind.name()),
            })
        };
        let provider = self.providers.iter().find(is_own)?;
        let Choice { catalogue, rules, .. } = self.choice(provider, &Arc::default());
        let needs = Needs::of_pool(pool, &rules.defaults);
        Some(Pool {
            name: pool.to_string().into(),
            provider,
            share: NodeShare::of(&catalogue, &needs).unwrap_or_default(),
            machine: needs.machine(),
            count: pool.count,
            ttl: pool.ttl,
            candidates: Some(rank(&catalogue, &needs, &rules, &())),
            further: rank_further(&catalogue, &needs, &rules),
        })
    }

    /// Returns the boot times of an offering's instances; `None`: the boot times of its type.
    pub(super) fn boot_of(&self, offering: &Offering) -> Option<Quantiles> {
        match self.on_node_of(self.provider_of(offering)) {
            Some(_) => Some(Quantiles::of_boots(BOOT_ON_NODE)),
            None => self.boot,
        }
    }
}
