//! The node of a simulation: the configuration of its daemon.

use std::{sync::Arc, time::Duration};

use kiyot_config::{MilpaBackend, ProviderKind, WarmPool};
use kiyot_engine::{
    engine::{Limits, Pool, ProviderKey},
    placement::{Candidate, Catalogue, Needs, NodeShare, Offering, Rules, rank, rank_further},
    request::Architecture,
};

use crate::{
    Workload,
    cloud::{CAPABILITIES, SECOND, SimCloud, ZONES},
    daemon::HEALTHY_TIMEOUT,
    rng::{Quantiles, Rng},
};

/// The time from an order until a cell is bound, on a random node.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(300);
/// The least limits of cells and boots of a random node that has limits.
const FEW_CELLS: usize = 8;
const FEW_BOOTS: usize = 2;
/// The pods of a random day for each cell and each boot at a time that these limits allow.
const PODS_OF_A_CELL: usize = 80;
const PODS_OF_A_BOOT: usize = 1500;
/// The least and the most seconds for which pods of a random node wait for spot.
const SPOT_DEADLINE: (u64, u64) = (0, 120);
/// The most pools of a random node.
const MAX_POOLS: usize = 2;
/// The most cells of a random pool.
pub(super) const MAX_COUNT: usize = 3;
/// The least and the most offerings of a random pool.
const POOL_CANDIDATES: (usize, usize) = (1, 4);
/// The age at which the cells of a random pool are replaced, in seconds.
const POOL_TTL: (u64, u64) = (300, 7200);

/// The configuration of a simulated node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The instance types of the provider.
    pub catalogue: Arc<Catalogue>,
    /// The rules of the choice.
    pub rules: Arc<Rules>,
    /// The limits of launches.
    pub limits: Limits,
    /// Bounds the time from an order until a cell is bound to its pod.
    pub launch_timeout: Duration,
    /// The time for which an agent may be silent; `None` is no limit.
    pub healthy_timeout: Option<Duration>,
    /// The time for which a pod that prefers spot waits for it.
    pub spot_deadline: Duration,
    /// The pools of cells that wait for pods.
    pub pools: Vec<WarmPool>,
    /// The median time from a launch until the agent connects.
    pub boot: Duration,
}

impl NodeOptions {
    /// Returns the node of a configured backend.
    pub fn of(config: &MilpaBackend, catalogue: Arc<Catalogue>, boot: Duration) -> Self {
        let provider = config.providers.first().copied().unwrap_or(ProviderKind::Netns);
        Self {
            catalogue,
            rules: Arc::new(Rules::of(config, provider)),
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
    /// True if the last zone is of a second provider.
    has_two_providers: bool,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) rules: Arc<Rules>,
    pub(super) limits: Limits,
    pub(super) launch_timeout: Duration,
    pub(super) healthy_timeout: Option<Duration>,
    pub(super) spot_deadline: Duration,
    pub(super) pools: Vec<Pool>,
    /// The boot times of all instances; `None` for those of their types.
    pub(super) boot: Option<Quantiles>,
}

impl Node {
    /// Returns the keys of the providers.
    pub(super) fn providers(&self) -> Vec<ProviderKey> {
        let second = self.has_two_providers.then_some(SECOND);
        [CAPABILITIES.provider].into_iter().chain(second).collect()
    }

    /// Returns the provider of an offering.
    pub(super) fn provider_of(&self, offering: &Offering) -> ProviderKey {
        let is_second = self.has_two_providers && ZONES.last() == Some(&offering.zone.as_str());
        if is_second { SECOND } else { CAPABILITIES.provider }
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
        Self {
            has_two_providers,
            catalogue: Arc::new(catalogue),
            rules: Arc::default(),
            limits: Limits { max_cells, boots, ..Limits::default() },
            launch_timeout: LAUNCH_TIMEOUT,
            healthy_timeout: Some(HEALTHY_TIMEOUT),
            spot_deadline: rng.seconds(SPOT_DEADLINE.0, SPOT_DEADLINE.1),
            pools,
            boot: None,
        }
    }

    fn configured(options: &NodeOptions) -> Self {
        let NodeOptions { catalogue, rules, limits, .. } = options.clone();
        let NodeOptions { launch_timeout, healthy_timeout, spot_deadline, .. } = *options;
        let pool = |pool: &WarmPool| {
            let needs = Needs::of_pool(pool, &rules.defaults);
            Pool {
                name: pool.to_string().into(),
                provider: CAPABILITIES.provider,
                share: NodeShare::default(),
                machine: needs.machine(),
                count: pool.count,
                ttl: pool.ttl,
                candidates: Some(rank(&catalogue, &needs, &rules, &())),
                further: rank_further(&catalogue, &needs, &rules),
            }
        };
        Self {
            has_two_providers: false,
            pools: options.pools.iter().map(pool).collect(),
            boot: Some(Quantiles::of_boots(options.boot)),
            catalogue,
            rules,
            limits,
            launch_timeout,
            healthy_timeout,
            spot_deadline,
        }
    }
}
