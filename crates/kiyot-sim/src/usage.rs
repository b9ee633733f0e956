//! Usage: start times, the cost of instances, and the number of instances over time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kiyot_engine::id::CellId;
use kiyot_values::price::{Cost, Price};

use crate::{cloud::SimInstance, world::World};

/// The number of parts into which the time is divided.
const SLOTS: u32 = 72;

/// Times, instances and cost of a simulation's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// The number of pods that started.
    pub started: u64,
    /// The times from a pod's first call to its bound cell; `None` without a pod.
    pub starts: Option<Percentiles>,
    /// The number of pods that started in a warm cell.
    pub warm_starts: u64,
    /// The number of pods that started in a cell on the node.
    pub on_node: u64,
    /// The number of the kubelet's calls that failed and were repeated.
    pub failed_calls: u64,
    /// The number of pods that no offering fits, and the reason for the first pod.
    pub unplaced: (u64, String),
    /// The number of pods that did not start in time, and the last error of one of these pods.
    pub unstarted: (u64, String),
    /// The cost of all instances, from launch to end.
    pub cost: Cost,
    /// The part of the cost before an instance had a pod.
    pub cost_before_pods: Cost,
    /// The cost by namespace, as the daemon counts it. Cells without a pod count for the empty
    /// namespace.
    pub namespaces: BTreeMap<String, Cost>,
    /// The length of a part of the time.
    pub slot: Duration,
    /// The instances in each part of the time.
    pub shares: Vec<Share>,
}

/// The percentiles of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percentiles {
    /// The median.
    pub p50: Duration,
    /// The 90th percentile.
    pub p90: Duration,
    /// The 99th percentile.
    pub p99: Duration,
    /// The longest time.
    pub most: Duration,
}

/// The average number of instances in a part of the time, in thousandths of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// The instances with a pod.
    pub with_pod: u64,
    /// The instances that boot or wait for a pod.
    pub without_pod: u64,
}

/// A meter of the use by pods and instances.
#[derive(Debug)]
pub(super) struct Meter {
    starts: Vec<Duration>,
    warm_starts: u64,
    on_node: u64,
    pub(super) failed_calls: u64,
    pub(super) unplaced: (u64, String),
    pub(super) unstarted: u64,
    /// The last error of an order.
    pub(super) error: String,
    /// The cells that were taken from a pool.
    taken: BTreeSet<CellId>,
    /// The times at which cells were bound.
    bound: BTreeMap<CellId, Duration>,
    cost: Cost,
    cost_before_pods: Cost,
    slot: Duration,
    /// The milliseconds of instances with and without a pod.
    slots: Vec<(u128, u128)>,
}

impl Percentiles {
    fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1);
        Some(Self { p50: *at(50)?, p90: *at(90)?, p99: *at(99)?, most: *times.last()? })
    }
}

impl Meter {
    pub(super) fn new(duration: Duration) -> Self {
        Self {
            starts: Vec::new(),
            warm_starts: 0,
            on_node: 0,
            failed_calls: 0,
            unplaced: (0, String::new()),
            unstarted: 0,
            error: String::new(),
            taken: BTreeSet::new(),
            bound: BTreeMap::new(),
            cost: Cost::default(),
            cost_before_pods: Cost::default(),
            slot: (duration / SLOTS).max(Duration::from_secs(1)),
            slots: vec![(0, 0); SLOTS as usize],
        }
    }

    /// Counts a pod's start.
    pub(super) fn started(&mut self, cell: &CellId, took: Duration, is_on_node: bool) {
        self.starts.push(took);
        self.on_node += u64::from(is_on_node);
        self.warm_starts += u64::from(self.taken.contains(cell));
    }

    pub(super) fn taken(&mut self, cell: &CellId) {
        self.taken.insert(cell.clone());
    }

    pub(super) fn bound(&mut self, cell: &CellId, now: Duration) {
        self.bound.entry(cell.clone()).or_insert(now);
    }

    /// Counts an instance that has ended or ends now.
    pub(super) fn add(&mut self, instance: &SimInstance, now: Duration) {
        let cell = &instance.spec.cell;
        let ended = instance.ending.map_or(now, |(_, ended)| ended.min(now));
        let bound = self.bound.remove(cell).unwrap_or(ended).clamp(instance.launched, ended);
        self.taken.remove(cell);
        let mut candidates = instance.spec.candidates.iter();
        let priced = candidates.find(|candidate| candidate.offering == instance.offering);
        let price = priced.map_or(Price::FREE, |candidate| candidate.price);
        self.cost = self.cost + price.over(ended.saturating_sub(instance.launched));
        let before = bound - instance.launched;
        self.cost_before_pods = self.cost_before_pods + price.over(before);
        let slot = |time: Duration| (time.as_nanos() / self.slot.as_nanos().max(1)) as usize;
        let touched = slot(instance.launched)..slot(ended).saturating_add(1).min(self.slots.len());
        let slots = self.slots.get_mut(touched.clone()).unwrap_or_default();
        for (number, (with_pod, without_pod)) in (touched.start as u32..).zip(slots) {
            let (begin, end) = (self.slot * number, self.slot * (number + 1));
            let overlap = |from: Duration, to: Duration| {
                to.min(end).saturating_sub(from.max(begin)).as_millis()
            };
            *without_pod += overlap(instance.launched, bound);
            *with_pod += overlap(bound, ended);
        }
    }
}

impl World<'_> {
    /// Returns the usage by pods and instances.
    pub(super) fn usage(&mut self) -> Usage {
        let now = self.now;
        for instance in self.cloud.instances().values() {
            self.meter.add(instance, now);
        }
        let meter = &mut self.meter;
        let slot = meter.slot.as_millis();
        let average = |millis: u128| u64::try_from(millis * 1000 / slot).unwrap_or(u64::MAX);
        let share = |(with_pod, without_pod): &(u128, u128)| Share {
            with_pod: average(*with_pod),
            without_pod: average(*without_pod),
        };
        let namespace = |(name, record): (&String, &kiyot_proto::store::NamespaceCost)| {
            (name.clone(), Cost::from_micros(record.micros))
        };
        Usage {
            started: meter.starts.len() as u64,
            starts: Percentiles::of(std::mem::take(&mut meter.starts)),
            warm_starts: meter.warm_starts,
            on_node: meter.on_node,
            failed_calls: meter.failed_calls,
            unplaced: std::mem::take(&mut meter.unplaced),
            unstarted: (meter.unstarted, std::mem::take(&mut meter.error)),
            cost: meter.cost,
            cost_before_pods: meter.cost_before_pods,
            namespaces: self.costs.iter().map(namespace).collect(),
            slot: meter.slot,
            shares: meter.slots.iter().map(share).collect(),
        }
    }
}
