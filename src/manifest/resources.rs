//! Requests and limits, and the runtime's resources that the kubelet derives.

use kiyot_proto::cri;

use crate::{
    annotations::Quantity,
    problems::{Field, Table},
};

/// Shares of a CPU.
const SHARES_PER_CPU: u64 = 1024;
const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
/// CPU period and least quota, in microseconds.
const PERIOD_MICROS: i64 = 100_000;
const MIN_QUOTA_MICROS: i64 = 1000;
/// OOM scores of pkg/kubelet/qos/policy.go.
const GUARANTEED_SCORE: i64 = -997;
const BEST_EFFORT_SCORE: i64 = 1000;

/// Requests and limits of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// CPU request, in milli-CPUs.
    pub cpu_request: Option<u64>,
    /// CPU limit, in milli-CPUs.
    pub cpu_limit: Option<u64>,
    /// Memory request, in bytes.
    pub memory_request: Option<u64>,
    /// Memory limit, in bytes.
    pub memory_limit: Option<u64>,
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
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let [limits, requests] = ["limits", "requests"]
            .map(|key| table.take(key).and_then(Field::table).map(read_list).unwrap_or_default());
        table.finish();
        // The API server sets an absent request to the limit.
        Self {
            cpu_request: requests.0.or(limits.0),
            cpu_limit: limits.0,
            memory_request: requests.1.or(limits.1),
            memory_limit: limits.1,
        }
    }

    /// Returns the overhead of a RuntimeClass: each amount is request and limit.
    pub(super) fn read_overhead(table: Table<'_>) -> Self {
        let (cpu, memory) = read_list(table);
        Self { cpu_request: cpu, cpu_limit: cpu, memory_request: memory, memory_limit: memory }
    }

    /// Says if there are no requests and no limits.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn is_guaranteed(&self) -> bool {
        let equal = |request: Option<u64>, limit: Option<u64>| {
            limit.is_some_and(|limit| limit > 0) && request == limit
        };
        equal(self.cpu_request, self.cpu_limit) && equal(self.memory_request, self.memory_limit)
    }

    /// Adds each amount: both run at the same time.
    pub(super) fn plus(&self, other: &Self) -> Self {
        self.joined(other, u64::saturating_add)
    }

    /// Takes the greater of each amount: both never run at the same time.
    pub(super) fn max(&self, other: &Self) -> Self {
        self.joined(other, u64::max)
    }

    fn joined(&self, other: &Self, join: fn(u64, u64) -> u64) -> Self {
        let both = |one: Option<u64>, other: Option<u64>| match (one, other) {
            (Some(one), Some(other)) => Some(join(one, other)),
            (one, other) => one.or(other),
        };
        Self {
            cpu_request: both(self.cpu_request, other.cpu_request),
            cpu_limit: both(self.cpu_limit, other.cpu_limit),
            memory_request: both(self.memory_request, other.memory_request),
            memory_limit: both(self.memory_limit, other.memory_limit),
        }
    }

    /// Returns the runtime's resources (`calculateLinuxResources` of pkg/kubelet/kuberuntime). CRI
    /// has no field for the memory request.
    pub(super) fn to_cri(self) -> cri::LinuxContainerResources {
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
    pub(super) fn oom_score(self, class: QosClass, node_memory: u64) -> i64 {
        match class {
            QosClass::Guaranteed => GUARANTEED_SCORE,
            QosClass::BestEffort => BEST_EFFORT_SCORE,
            QosClass::Burstable => {
                let share = u128::from(self.memory_request.unwrap_or_default()) * 1000
                    / u128::from(node_memory.max(1));
                let score = 1000_i64.saturating_sub(i64::try_from(share).unwrap_or(i64::MAX));
                // Between the scores of guaranteed and best-effort containers.
                score.clamp(1000 + GUARANTEED_SCORE, BEST_EFFORT_SCORE - 1)
            }
        }
    }
}

/// Returns the class of a pod with these containers (pkg/apis/core/v1/helper/qos).
pub(super) fn class_of<'a>(containers: impl Iterator<Item = &'a Resources> + Clone) -> QosClass {
    if containers.clone().all(Resources::is_empty) {
        QosClass::BestEffort
    } else if containers.clone().all(Resources::is_guaranteed) {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// Reads milli-CPUs and bytes.
fn read_list(mut table: Table<'_>) -> (Option<u64>, Option<u64>) {
    const ALLOWED: &str = "a quantity such as 500m, 2 or 1.5Gi, not negative";
    let cpu = table.take("cpu").and_then(|field| quantity(field, ALLOWED)).map(Quantity::milli);
    let memory =
        table.take("memory").and_then(|field| quantity(field, ALLOWED)).map(Quantity::units);
    // For the scheduler and eviction.
    table.take("ephemeral-storage");
    table.finish();
    (cpu, memory)
}

/// Reads a quantity, which YAML has as a text or as a number.
pub(super) fn quantity(field: Field<'_>, allowed: &str) -> Option<Quantity> {
    field.read_text_or_number(allowed, |text| text.parse().ok())
}
