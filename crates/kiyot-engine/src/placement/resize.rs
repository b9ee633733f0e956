//! Bounds updates of a container's resources by the machine of its cell.

use std::fmt;

use kiyot_proto::cri::LinuxContainerResources;

use crate::placement::{
    CellResources,
    fit::Cpus,
    needs::{milli_cpu_limit, milli_cpu_request},
};

/// A resource that an update raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resource {
    CpuLimit,
    CpuRequest,
    MemoryLimit,
}

/// An update that exceeds what the cell's machine has for all containers of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct BeyondCell {
    resource: Resource,
    wanted: u64,
    together: u64,
    has: u64,
}

/// Refuses an update that raises a limit or request beyond what the pod's other containers
/// (`others`) leave. CRI has no memory requests.
///
/// Limits may already exceed the machine, because a cell is sized by requests if a container has no
/// limit.
pub fn check_resize(
    cell: CellResources,
    current: &LinuxContainerResources,
    update: &LinuxContainerResources,
    others: &[LinuxContainerResources],
) -> Result<(), BeyondCell> {
    let updated = updated(current, update);
    for resource in [Resource::CpuLimit, Resource::CpuRequest, Resource::MemoryLimit] {
        let (wanted, has) = (resource.of(&updated), resource.of_cell(cell));
        let sum = |sum: u64, other| sum.saturating_add(resource.of(other));
        let together = others.iter().fold(wanted, sum);
        if wanted > resource.of(current) && together > has {
            return Err(BeyondCell { resource, wanted, together, has });
        }
    }
    Ok(())
}

/// Returns the resources after an update. A 0 in the update keeps the value.
fn updated(
    current: &LinuxContainerResources,
    update: &LinuxContainerResources,
) -> LinuxContainerResources {
    let value = |of: fn(&LinuxContainerResources) -> i64| match of(update) {
        0 => of(current),
        value => value,
    };
    LinuxContainerResources {
        cpu_period: value(|it| it.cpu_period),
        cpu_quota: value(|it| it.cpu_quota),
        cpu_shares: value(|it| it.cpu_shares),
        memory_limit_in_bytes: value(|it| it.memory_limit_in_bytes),
        ..LinuxContainerResources::default()
    }
}

impl Resource {
    /// Returns thousandths of a CPU or bytes; 0 for no limit or request.
    fn of(self, resources: &LinuxContainerResources) -> u64 {
        match self {
            Self::CpuLimit => milli_cpu_limit(resources).unwrap_or_default(),
            Self::CpuRequest => milli_cpu_request(resources).unwrap_or_default(),
            Self::MemoryLimit => resources.memory_limit_in_bytes.max(0).unsigned_abs(),
        }
    }

    fn of_cell(self, cell: CellResources) -> u64 {
        match self {
            Self::CpuLimit | Self::CpuRequest => cell.milli_cpus,
            Self::MemoryLimit => cell.memory,
        }
    }

    fn shown(self, amount: u64) -> String {
        match self {
            Self::CpuLimit | Self::CpuRequest => format!("{} CPU", Cpus(amount)),
            Self::MemoryLimit => format!("{} MiB", amount.div_ceil(1 << 20)),
        }
    }
}

impl fmt::Display for BeyondCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resource, wanted, together, has } = *self;
        let name = match resource {
            Resource::CpuLimit => "limits.cpu",
            Resource::CpuRequest => "requests.cpu",
            Resource::MemoryLimit => "limits.memory",
        };
        let [wanted, together, has] = [wanted, together, has].map(|amount| resource.shown(amount));
        write!(f, "{name} of {wanted} is beyond its cell: with the pod's other containers ")?;
        write!(f, "{together}; allowed: {has}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CELL: CellResources = CellResources { milli_cpus: 2000, memory: 1 << 30 };

    /// Returns the resources as a kubelet sends them; 0 for no limit or request.
    fn resources(milli_limit: i64, milli_request: i64, memory: i64) -> LinuxContainerResources {
        LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: milli_limit * 100,
            cpu_shares: (milli_request * 1024 / 1000).max(2),
            memory_limit_in_bytes: memory,
            ..LinuxContainerResources::default()
        }
    }

    /// Verifies U29.
    #[test]
    fn update_beyond_the_cell_names_value_sum_and_bound() {
        let (current, other) = (resources(500, 500, 256 << 20), resources(1000, 1000, 512 << 20));
        let text = |update| {
            check_resize(CELL, &current, &update, std::slice::from_ref(&other)).unwrap_err()
        };
        for (update, expected) in [
            (
                resources(1001, 0, 0),
                "limits.cpu of 1.001 CPU is beyond its cell: with the pod's \
                                     other containers 2.001 CPU; allowed: 2 CPU",
            ),
            (
                resources(1000, 1001, 0),
                "requests.cpu of 1.001 CPU is beyond its cell: with the \
                                        pod's other containers 2.001 CPU; allowed: 2 CPU",
            ),
            (
                resources(0, 0, (512 << 20) + 1),
                "limits.memory of 513 MiB is beyond its cell: with \
                                                the pod's other containers 1025 MiB; allowed: \
                                                1024 MiB",
            ),
        ] {
            assert_eq!(text(update).to_string(), expected);
        }
        let fits = resources(1000, 1000, 512 << 20);
        assert_eq!(check_resize(CELL, &current, &fits, std::slice::from_ref(&other)), Ok(()));
        // 0 keeps the value, and a negative value removes the limit.
        for (quota, memory) in [(0, 0), (-1, -1)] {
            let update = LinuxContainerResources {
                cpu_quota: quota,
                memory_limit_in_bytes: memory,
                ..LinuxContainerResources::default()
            };
            let much = resources(9000, 9000, i64::MAX);
            assert_eq!(check_resize(CELL, &much, &update, &[other.clone(), much.clone()]), Ok(()));
        }
    }

    fn any_resources() -> impl Strategy<Value = LinuxContainerResources> {
        let memory = prop_oneof![0..2_i64 << 30, Just(i64::MAX)];
        (0..3000_i64, 0..3000_i64, memory)
            .prop_map(|(cpu, request, memory)| resources(cpu, request, memory))
    }

    proptest! {
        /// Verifies U29.
        #[test]
        fn update_is_refused_if_it_raises_a_sum_beyond_the_cell(
            current in any_resources(),
            update in any_resources(),
            others in prop::collection::vec(any_resources(), 0..4),
        ) {
            let milli = |quota: i64| quota.unsigned_abs() / 100;
            let shares = |it: &LinuxContainerResources| match it.cpu_shares {
                2 => 0,
                shares => (shares.unsigned_abs() * 1000).div_ceil(1024),
            };
            let is_beyond = |of: &dyn Fn(&LinuxContainerResources) -> u64, has: u64| {
                // An update keeps the values that it does not name.
                let wanted = match of(&update) { 0 => of(&current), wanted => wanted };
                let sum: u128 = others.iter().map(|other| u128::from(of(other))).sum();
                wanted > of(&current) && sum + u128::from(wanted) > u128::from(has)
            };
            let expected = is_beyond(&|it| milli(it.cpu_quota), CELL.milli_cpus)
                || is_beyond(&shares, CELL.milli_cpus)
                || is_beyond(&|it| it.memory_limit_in_bytes.unsigned_abs(), CELL.memory);
            let refused = check_resize(CELL, &current, &update, &others).is_err();
            prop_assert_eq!(refused, expected);
        }
    }
}
