//! The node's memory for virtual machines. A launch that would not fit is refused, so that the
//! kernel need not kill processes.

use std::{
    collections::HashMap,
    fs, io,
    sync::{Arc, Mutex, PoisonError},
};

use kiyot_engine::{
    id::CellId,
    placement::Size,
    provider::{ErrorClass, ProviderError},
};
use kiyot_link::vm_file::{Accelerator, TCG_CACHE_MIB, VmFile};

use crate::Instances;

/// The memory of a QEMU process and its launcher, without the guest's, in MiB.
const PROCESS_MIB: u64 = 64;
/// The margin between [`needed_mib`] and the limit at which the kernel ends a machine's processes,
/// in MiB: the kernel's buffers for them, and the part of the disk that is being written.
const LIMIT_MARGIN_MIB: u64 = 128;
/// The bytes in a MiB.
const MIB: u64 = 1 << 20;

/// Returns the memory that a machine may touch on the node, in MiB.
pub(super) fn needed_mib(machine: &VmFile) -> u64 {
    let cache = match machine.accelerator {
        Accelerator::Kvm => 0,
        Accelerator::Tcg => TCG_CACHE_MIB,
    };
    machine.memory_mib.saturating_add(PROCESS_MIB + cache)
}

/// Returns the memory limit of a machine's processes, in bytes. It is above their need, and keeps a
/// guest that takes over its QEMU from taking the node's memory.
pub(super) fn limit_bytes(machine: &VmFile) -> u64 {
    needed_mib(machine).saturating_add(LIMIT_MARGIN_MIB).saturating_mul(MIB)
}

/// The memory of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeMemory {
    /// All memory, in MiB.
    pub(crate) total_mib: u64,
    /// The memory that processes can get without swapping, in MiB.
    pub(super) available_mib: u64,
}

impl NodeMemory {
    /// Reads `/proc/meminfo`.
    pub(crate) fn read() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/meminfo")?)
            .ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal and MemAvailable in kB"))
    }

    fn parse(text: &str) -> Option<Self> {
        let mib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
            Some(kib / 1024)
        };
        Some(Self { total_mib: mib("MemTotal:")?, available_mib: mib("MemAvailable:")? })
    }
}

/// The memory that launches have reserved and their machines have not touched yet, in MiB.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory(Arc<Mutex<HashMap<CellId, u64>>>);

/// A reservation of memory. After it is dropped, the instance's record counts.
#[derive(Debug)]
pub(super) struct Reserved {
    memory: Memory,
    cell: CellId,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut pending = self.memory.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.remove(&self.cell);
    }
}

impl Memory {
    /// Reserves memory for a launch, if the node has enough besides the memory that running
    /// machines and pending launches may still touch. Blocking.
    pub(super) fn reserve(
        &self,
        instances: &Instances,
        cell: &CellId,
        needed_mib: u64,
    ) -> Result<Reserved, ProviderError> {
        let failed = |error| ProviderError::transient("look at the node's memory", error);
        // Held while the memory is read, so that concurrent launches reserve different memory.
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let running = instances.resident().map_err(failed)?;
        let node = NodeMemory::read().map_err(failed)?;
        let running = running.iter().filter(|(cell, ..)| !pending.contains_key(cell));
        let sizes = running.map(|(_, name, resident)| (size_mib(name), resident / MIB));
        let untouched = untouched_mib(sizes).saturating_add(pending.values().sum());
        if node.available_mib < untouched.saturating_add(needed_mib) {
            let doing = format!(
                "{needed_mib} MiB of memory for {cell}: the node has {} MiB available, of which \
                 other cells may need {untouched} MiB",
                node.available_mib
            );
            return Err(ProviderError::without_cause(ErrorClass::Capacity, doing));
        }
        pending.insert(cell.clone(), needed_mib);
        Ok(Reserved { memory: self.clone(), cell: cell.clone() })
    }
}

/// Returns the most memory that a machine of this instance type may touch, in MiB.
fn size_mib(name: &str) -> u64 {
    Size::parse(name).map_or(0, |size| size.memory_mib + PROCESS_MIB + TCG_CACHE_MIB)
}

/// Returns the memory that running machines may still touch, in MiB. Each item is a machine's size
/// and the memory that it has touched.
fn untouched_mib(running: impl Iterator<Item = (u64, u64)>) -> u64 {
    running.map(|(size, resident)| size.saturating_sub(resident)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiyot_config::MilpaBackend;

    #[test]
    fn meminfo_is_parsed() {
        let text =
            "MemTotal:       24689520 kB\nMemFree:        20 kB\nMemAvailable:   2097152 kB\n";
        let node = NodeMemory::parse(text).unwrap();
        assert_eq!((node.total_mib, node.available_mib), (24110, 2048));
        assert_eq!(NodeMemory::parse("MemTotal: 1 kB\n"), None);
    }

    /// Verifies N27.
    #[test]
    fn untouched_memory_of_a_running_machine_is_reserved() {
        assert_eq!(untouched_mib([(1000, 300), (500, 700), (0, 9)].into_iter()), 700);
        assert_eq!(size_mib("2cpu-704mib"), 704 + 64 + 128);
        assert_eq!(size_mib("netns"), 0);
    }

    /// Verifies N27.
    #[test]
    fn launch_without_memory_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let config = MilpaBackend { state_dir: dir.path().into(), ..MilpaBackend::default() };
        let instances = Instances::new(&config, &config.qemu.network, None, "any");
        let memory = Memory::default();
        let total = NodeMemory::read().unwrap().total_mib;
        let [one, other] = [(); 2].map(|()| CellId::mint().unwrap());
        let error = memory.reserve(&instances, &one, total + 1).unwrap_err();
        assert_eq!(error.class, ErrorClass::Capacity);
        assert!(error.doing.contains(one.as_str()) && error.doing.contains("MiB"), "{error}");
        // A pending launch counts until its reservation is dropped.
        let held = memory.0.lock().unwrap().insert(other.clone(), total);
        assert_eq!(held, None);
        let reserved = Reserved { memory: memory.clone(), cell: other };
        assert!(memory.reserve(&instances, &one, 1).is_err());
        drop(reserved);
        assert!(memory.reserve(&instances, &one, 1).is_ok());
        assert!(memory.0.lock().unwrap().is_empty());
    }
}
