//! Requests and limits, and the runtime's resources that the kubelet derives.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use kiyot_proto::cri;
use kiyot_values::{
    names::{EXTENDED_CPU, EXTENDED_MEMORY, EXTENDED_STORAGE},
    quantity::Quantity,
};

use super::place::Place;

mod amounts;

use amounts::{Amounts, Quantities};

/// Shares of a CPU.
const SHARES_PER_CPU: u64 = 1024;
const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
/// CPU period and smallest quota, in microseconds.
const PERIOD_MICROS: i64 = 100_000;
const MIN_QUOTA_MICROS: i64 = 1000;
/// OOM scores of pkg/kubelet/qos/policy.go.
const GUARANTEED_SCORE: i64 = -997;
const BEST_EFFORT_SCORE: i64 = 1000;

/// Requests and limits of a container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resources {
    /// CPU request, in milli-CPUs.
    pub cpu_request: Option<u64>,
    /// CPU limit, in milli-CPUs.
    pub cpu_limit: Option<u64>,
    /// Memory request, in bytes.
    pub memory_request: Option<u64>,
    /// Memory limit, in bytes.
    pub memory_limit: Option<u64>,
    /// Request of `ephemeral-storage`, in bytes.
    pub storage_request: Option<u64>,
    /// Limit of `ephemeral-storage`, in bytes.
    pub storage_limit: Option<u64>,
    /// Extended resources such as `nvidia.com/gpu`, and huge pages by `hugepages-SIZE`. Their
    /// requests equal their limits, in whole units.
    pub extended: BTreeMap<String, u64>,
}

/// QoS class of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QosClass {
    /// All containers have limits of both kinds, equal to their requests.
    Guaranteed,
    /// All other pods.
    Burstable,
    /// No container has requests or limits.
    BestEffort,
}

impl Resources {
    pub(super) fn read(at: &Place<'_>, resources: ResourceRequirements) -> Self {
        let given = Self::read_as_given(at, resources);
        // The API server sets an absent request to the limit.
        Self {
            cpu_request: given.cpu_request.or(given.cpu_limit),
            memory_request: given.memory_request.or(given.memory_limit),
            storage_request: given.storage_request.or(given.storage_limit),
            ..given
        }
    }

    /// Reads requests and limits without the API server's defaults.
    pub(super) fn read_as_given(at: &Place<'_>, resources: ResourceRequirements) -> Self {
        let ResourceRequirements { requests, limits, .. } = resources;
        let [given, most] = [requests, limits].map(Option::unwrap_or_default);
        let at_requests = at.of("requests");
        let limits = Amounts::read(&at.of("limits"), &most);
        let requests = Amounts::read(&at_requests, &given);
        requests.check_limits(&at_requests, &given, (&limits, &most));
        Self::of(&requests, limits)
    }

    /// Reads the overhead of a RuntimeClass: each amount is request and limit.
    pub(super) fn read_overhead(at: &Place<'_>, overhead: &Quantities) -> Self {
        let amounts = Amounts::read(at, overhead);
        Self::of(&amounts.clone(), amounts)
    }

    fn of(requests: &Amounts, limits: Amounts) -> Self {
        Self {
            cpu_request: requests.cpu.map(Quantity::milli),
            cpu_limit: limits.cpu.map(Quantity::milli),
            memory_request: requests.memory.map(Quantity::units),
            memory_limit: limits.memory.map(Quantity::units),
            storage_request: requests.storage.map(Quantity::units),
            storage_limit: limits.storage.map(Quantity::units),
            extended: limits.extended,
        }
    }

    /// Returns whether there are no requests and no limits.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether there are no requests and no limits of CPU and memory, which decide the QoS
    /// class.
    fn has_no_compute(&self) -> bool {
        [self.cpu_request, self.cpu_limit, self.memory_request, self.memory_limit]
            .iter()
            .all(|amount| amount.unwrap_or_default() == 0)
    }

    fn is_guaranteed(&self) -> bool {
        let equal = |request: Option<u64>, limit: Option<u64>| {
            limit.is_some_and(|limit| limit > 0) && request == limit
        };
        equal(self.cpu_request, self.cpu_limit) && equal(self.memory_request, self.memory_limit)
    }

    /// Returns the resources with each request raised to its extended resource.
    pub(super) fn with_extended(&self) -> Self {
        let larger = |own: Option<u64>, name: &str, unit: u64| {
            own.max(self.extended.get(name).map(|amount| amount.saturating_mul(unit)))
        };
        Self {
            cpu_request: larger(self.cpu_request, EXTENDED_CPU, 1000),
            memory_request: larger(self.memory_request, EXTENDED_MEMORY, 1),
            storage_request: larger(self.storage_request, EXTENDED_STORAGE, 1),
            ..self.clone()
        }
    }

    /// Adds each amount, for containers that run at the same time.
    pub(super) fn plus(&self, other: &Self) -> Self {
        self.joined(other, u64::saturating_add)
    }

    /// Takes the larger of each amount, for containers that never run at the same time.
    pub(super) fn max(&self, other: &Self) -> Self {
        self.joined(other, u64::max)
    }

    fn joined(&self, other: &Self, join: fn(u64, u64) -> u64) -> Self {
        let both = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(join(one, other)),
            (one, other) => one.or(other),
        };
        let mut extended = self.extended.clone();
        for (name, amount) in &other.extended {
            let sum = extended.get(name).map_or(*amount, |own| join(*own, *amount));
            extended.insert(name.clone(), sum);
        }
        Self {
            cpu_request: both(self.cpu_request, other.cpu_request),
            cpu_limit: both(self.cpu_limit, other.cpu_limit),
            memory_request: both(self.memory_request, other.memory_request),
            memory_limit: both(self.memory_limit, other.memory_limit),
            storage_request: both(self.storage_request, other.storage_request),
            storage_limit: both(self.storage_limit, other.storage_limit),
            extended,
        }
    }

    /// Returns the resources of a pod from the total of its containers and the pod's `own`
    /// resources (pkg/apis/core/v1/defaults.go). The pod's own resources win, and an absent request
    /// equals the limit.
    pub(super) fn of_pod(self, own: &Self) -> Self {
        let mut extended = self.extended;
        extended.extend(own.extended.clone());
        Self {
            cpu_request: own.cpu_request.or(self.cpu_request).or(own.cpu_limit),
            cpu_limit: own.cpu_limit.or(self.cpu_limit),
            memory_request: own.memory_request.or(self.memory_request).or(own.memory_limit),
            memory_limit: own.memory_limit.or(self.memory_limit),
            extended,
            ..self
        }
    }

    /// Returns the runtime's resources (`calculateLinuxResources` of pkg/kubelet/kuberuntime). CRI
    /// has no field for the memory request.
    pub(super) fn to_cri(&self) -> cri::LinuxContainerResources {
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let shares = |milli: u64| {
            signed(milli.saturating_mul(SHARES_PER_CPU) / 1000).clamp(MIN_SHARES, MAX_SHARES)
        };
        let quota =
            |milli: u64| signed(milli).saturating_mul(PERIOD_MICROS / 1000).max(MIN_QUOTA_MICROS);
        cri::LinuxContainerResources {
            cpu_shares: shares(self.cpu_request.unwrap_or_default()),
            cpu_quota: self.cpu_limit.filter(|milli| *milli > 0).map(quota).unwrap_or_default(),
            cpu_period: PERIOD_MICROS,
            memory_limit_in_bytes: self.memory_limit.map(signed).unwrap_or_default(),
            ..Default::default()
        }
    }

    /// Returns the OOM score of a container with these resources, in a pod of a class.
    pub(super) fn oom_score(&self, class: QosClass, node_memory: u64) -> i64 {
        match class {
            QosClass::Guaranteed => GUARANTEED_SCORE,
            QosClass::BestEffort => BEST_EFFORT_SCORE,
            QosClass::Burstable => {
                let share = u128::from(self.memory_request.unwrap_or_default()) * 1000
                    / u128::from(node_memory.max(1));
                let score = 1000_i64.saturating_sub(i64::try_from(share).unwrap_or(i64::MAX));
                // The score lies between the scores of guaranteed and best-effort containers.
                score.clamp(1000 + GUARANTEED_SCORE, BEST_EFFORT_SCORE - 1)
            }
        }
    }
}

/// Returns the class of a pod with these containers (pkg/apis/core/v1/helper/qos).
pub(super) fn class_of<'a>(containers: impl Iterator<Item = &'a Resources> + Clone) -> QosClass {
    if containers.clone().all(Resources::has_no_compute) {
        QosClass::BestEffort
    } else if containers.clone().all(Resources::is_guaranteed) {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

#[cfg(test)]
mod tests;
