//! Limits and weight of a cell's own processes. They bound the node's resources
//! that a guest gets if it takes over its QEMU.

use std::{fs, io, path::Path};

use kiyot_linux::tree::{RelPath, beneath, own};

use crate::{
    cgroup::{self, Hierarchy, PARENT},
    shortage::found,
};

/// Limits of the processes in a cell's own cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The memory in bytes, page cache included.
    pub(crate) memory_bytes: u64,
    /// The processes and threads.
    pub(crate) pids: u64,
}

/// The file of a version of cgroups with a cgroup's weight among its siblings.
#[derive(Debug, Clone, Copy)]
struct WeightFile {
    name: &'static str,
    /// The weight of a tenth of a processor, by the kubelet's conversion (`MilliCPUToShares`,
    /// `CPUSharesToCPUWeight`). With less, a machine on a busy node would get no time and look
    /// lost.
    least: u64,
    most: u64,
}

/// The file of version 1.
const SHARES: WeightFile = WeightFile { name: "cpu.shares", least: 102, most: 1 << 18 };
/// The file of version 2.
const WEIGHT: WeightFile = WeightFile { name: "cpu.weight", least: 4, most: 10_000 };

/// Limits the processes in a cell's own cgroup. A limit without a controller on the node is
/// skipped.
pub(super) fn set(hierarchies: &[Hierarchy], cell: &str, limits: Limits) -> io::Result<()> {
    for (controller, v1_file, v2_file, value) in [
        ("memory", "memory.limit_in_bytes", "memory.max", limits.memory_bytes),
        ("pids", "pids.max", "pids.max", limits.pids),
    ] {
        for hierarchy in hierarchies {
            let dir = hierarchy.of_cell(cell);
            if hierarchy.has(controller) {
                write(&own(&dir, v1_file), &value.to_string())?;
            } else if hierarchy.is_v2() && delegates(&hierarchy.mount.join(PARENT), controller)? {
                write(&own(&dir, v2_file), &value.to_string())?;
            }
        }
    }
    Ok(())
}

/// Gives each cell's cgroup the CPU weight that the kubelet gave the cgroup of its pod
/// (`cgroup_parent`). A cell whose pod has no cgroup keeps its weight.
///
/// The parent of all cells gets the sum of their weights, with which it competes with the pods on
/// the node and with the system. The sum is at most the weight of the cgroup of all pods, which the
/// kubelet sets for the whole machine.
pub(super) fn inherit_weights<'a>(
    hierarchies: &[Hierarchy],
    pods: impl IntoIterator<Item = (&'a str, &'a str)> + Clone,
) -> io::Result<()> {
    for hierarchy in hierarchies {
        let Some(file) = weight_file(hierarchy)? else { continue };
        let (mut is_changed, mut machine) = (false, None);
        for (cell, cgroup_parent) in pods.clone() {
            let Some(pod) = cgroup::relative(cgroup_parent) else { continue };
            let Some(weight) = read(&pod.beneath(&hierarchy.mount), file)? else { continue };
            let weight = weight.clamp(file.least, file.most);
            machine = machine.max(weight_of_all(&pod, hierarchy, file)?);
            let dir = hierarchy.of_cell(cell);
            if dir.is_dir() && read(&dir, file)? != Some(weight) {
                write(&own(&dir, file.name), &weight.to_string())?;
                is_changed = true;
            }
        }
        if is_changed && let Some(sum) = sum_of_cells(hierarchy, file)? {
            let sum = machine.map_or(sum, |machine| sum.min(machine.max(file.least)));
            write(&own(&hierarchy.mount.join(PARENT), file.name), &sum.to_string())?;
        }
    }
    Ok(())
}

/// Returns the weight of the cgroup of all pods, which is the first part of a pod's path; `None` if
/// that cgroup is absent.
fn weight_of_all(
    pod: &RelPath,
    hierarchy: &Hierarchy,
    file: WeightFile,
) -> io::Result<Option<u64>> {
    let Some((top, _)) = pod.as_str().split_once('/') else { return Ok(None) };
    read(&beneath(&hierarchy.mount, top)?, file)
}

/// Lowers the weight of the parent of all cells after the removal of a cell.
pub(super) fn lower_parent(hierarchy: &Hierarchy) -> io::Result<()> {
    let file = if hierarchy.is_v2() { WEIGHT } else { SHARES };
    let parent = hierarchy.mount.join(PARENT);
    let Some(weight) = read(&parent, file)? else { return Ok(()) };
    match sum_of_cells(hierarchy, file)? {
        Some(sum) if sum < weight => write(&own(&parent, file.name), &sum.to_string()),
        _ => Ok(()),
    }
}

/// Returns the sum of the weights of all cells; `None` if no cell has a weight.
fn sum_of_cells(hierarchy: &Hierarchy, file: WeightFile) -> io::Result<Option<u64>> {
    let mut sum = None;
    for cell in cgroup::children(&hierarchy.mount.join(PARENT)) {
        if let Some(weight) = read(&cell, file)? {
            sum = Some(weight.saturating_add(sum.unwrap_or_default()));
        }
    }
    Ok(sum.map(|sum| sum.clamp(file.least, file.most)))
}

/// Returns the weight file of the cgroups in a hierarchy; `None` if cells have no weight there.
fn weight_file(hierarchy: &Hierarchy) -> io::Result<Option<WeightFile>> {
    if hierarchy.has("cpu") {
        return Ok(Some(SHARES));
    }
    let is_weighed = hierarchy.is_v2() && delegates(&hierarchy.mount.join(PARENT), "cpu")?;
    Ok(is_weighed.then_some(WEIGHT))
}

/// Returns the weight of a cgroup; `None` if the cgroup is absent.
fn read(dir: &Path, file: WeightFile) -> io::Result<Option<u64>> {
    let text = found(fs::read_to_string(own(dir, file.name)))?;
    Ok(text.and_then(|text| text.trim().parse().ok()))
}

/// Passes a controller on to the cgroups below a directory of version 2. Returns whether the
/// directory has the controller, which systemd decides at the root.
fn delegates(parent: &Path, controller: &str) -> io::Result<bool> {
    let controllers = found(fs::read_to_string(parent.join("cgroup.controllers")))?;
    if !controllers.unwrap_or_default().split_whitespace().any(|name| name == controller) {
        return Ok(false);
    }
    write(&parent.join("cgroup.subtree_control"), &format!("+{controller}"))?;
    Ok(true)
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|error| cgroup::named(path, error))
}

#[cfg(test)]
mod tests {
    use super::{super::cgroup::parse_hierarchies, *};

    const CELL: &str = "cell-aaaaaaaaaaaa";
    const LIMITS: Limits = Limits { memory_bytes: 4096, pids: 9 };

    /// Plain directories in the form of a hierarchy.
    struct Played {
        dir: tempfile::TempDir,
        hierarchies: Vec<Hierarchy>,
    }

    impl Played {
        fn new(kind: &str, options: &str, controllers: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let line =
                format!("30 1 0:1 / {} rw - {kind} {kind} {options}\n", dir.path().display());
            let hierarchies = parse_hierarchies(line.as_bytes());
            assert_eq!(hierarchies.len(), 1);
            let played = Self { dir, hierarchies };
            fs::create_dir_all(played.dir.path().join(cgroup::name(CELL))).unwrap();
            if !controllers.is_empty() {
                played.write("kiyot/cgroup.controllers", controllers);
            }
            played
        }

        fn v1(controllers: &str) -> Self {
            Self::new("cgroup", &format!("rw,{controllers}"), "")
        }

        fn v2(controllers: &str) -> Self {
            Self::new("cgroup2", "rw,nsdelegate", controllers)
        }

        fn write(&self, file: &str, value: &str) {
            let path = self.dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }

        fn read(&self, file: &str) -> String {
            fs::read_to_string(self.dir.path().join(file)).unwrap()
        }

        fn of_cell(&self, file: &str) -> String {
            self.read(&format!("kiyot/{CELL}/{file}"))
        }
    }

    /// Verifies V11.
    #[test]
    fn memory_and_processes_are_limited_in_both_versions_of_cgroups() {
        for (controller, file, value) in
            [("memory", "memory.limit_in_bytes", "4096"), ("pids", "pids.max", "9")]
        {
            let played = Played::v1(controller);
            set(&played.hierarchies, CELL, LIMITS).unwrap();
            assert_eq!(played.of_cell(file), value);
        }

        let played = Played::v2("cpu memory pids\n");
        set(&played.hierarchies, CELL, LIMITS).unwrap();
        // The kernel takes each write by itself; a file keeps the last.
        assert_eq!(played.read("kiyot/cgroup.subtree_control"), "+pids");
        assert_eq!(played.of_cell("memory.max"), "4096");
        assert_eq!(played.of_cell("pids.max"), "9");
    }

    #[test]
    fn node_without_the_controllers_has_no_limits_and_no_weight() {
        for played in [Played::v1("cpuacct"), Played::v2("")] {
            set(&played.hierarchies, CELL, LIMITS).unwrap();
            played.write("kubepods/pod1/cpu.shares", "512");
            played.write("kubepods/pod1/cpu.weight", "20");
            inherit_weights(&played.hierarchies, [(CELL, "/kubepods/pod1")]).unwrap();
            let files = fs::read_dir(played.dir.path().join(cgroup::name(CELL))).unwrap().count();
            assert_eq!(files, 0, "{:?}", played.hierarchies);
        }
    }

    /// Verifies V11.
    #[test]
    fn cell_has_the_weight_of_its_pod_and_all_cells_the_sum() {
        let played = Played::v1("cpu");
        played.write("kiyot/cpu.shares", "1024");
        played.write("kiyot/cell-bbbbbbbbbbbb/cpu.shares", "1024");
        played.write("kubepods/burstable/pod1/cpu.shares", "2048\n");
        inherit_weights(&played.hierarchies, [(CELL, "/kubepods/burstable/pod1")]).unwrap();
        assert_eq!(played.of_cell("cpu.shares"), "2048");
        assert_eq!(played.read("kiyot/cpu.shares"), "3072");

        fs::remove_dir_all(played.dir.path().join("kiyot/cell-bbbbbbbbbbbb")).unwrap();
        lower_parent(&played.hierarchies[0]).unwrap();
        assert_eq!(played.read("kiyot/cpu.shares"), "2048");

        let played = Played::v2("cpu memory\n");
        played.write("kubepods.slice/pod1.slice/cpu.weight", "79\n");
        inherit_weights(&played.hierarchies, [(CELL, "/kubepods.slice/pod1.slice/")]).unwrap();
        assert_eq!(played.read("kiyot/cgroup.subtree_control"), "+cpu");
        assert_eq!(played.of_cell("cpu.weight"), "79");
        assert_eq!(played.read("kiyot/cpu.weight"), "79");
    }

    /// Verifies V11.
    #[test]
    fn weights_follow_a_resize_of_their_pods() {
        let other = "cell-bbbbbbbbbbbb";
        let played = Played::v1("cpu");
        let pods =
            [(CELL, "/kubepods/pod1"), (other, "/kubepods/pod2"), ("cell-gone", "/kubepods")];
        played.write(&format!("kiyot/{other}/cpu.shares"), "1024");
        played.write("kubepods/cpu.shares", "8192");
        for (first, second) in [(1024, 2048), (512, 2048), (512, 4096)] {
            played.write("kubepods/pod1/cpu.shares", &format!("{first}\n"));
            played.write("kubepods/pod2/cpu.shares", &format!("{second}\n"));
            inherit_weights(&played.hierarchies, pods).unwrap();
            assert_eq!(played.of_cell("cpu.shares"), first.to_string());
            let of_other = played.read(&format!("kiyot/{other}/cpu.shares"));
            assert_eq!(of_other, second.to_string());
            assert_eq!(played.read("kiyot/cpu.shares"), (first + second).to_string());
        }
        // A right value is not written again.
        played.write("kiyot/cpu.shares", "1");
        inherit_weights(&played.hierarchies, pods).unwrap();
        assert_eq!(played.read("kiyot/cpu.shares"), "1");
    }

    /// Verifies V11.
    #[test]
    fn cells_together_weigh_no_more_than_all_pods_of_the_node() {
        for (played, file) in [(Played::v1("cpu"), SHARES), (Played::v2("cpu\n"), WEIGHT)] {
            let other = "cell-bbbbbbbbbbbb";
            let pods = [(CELL, "/kubepods.slice/pod1"), (other, "/kubepods.slice/b/pod2")];
            played.write(&format!("kiyot/{other}/{}", file.name), "100");
            played.write(&format!("kubepods.slice/pod1/{}", file.name), "1500\n");
            played.write(&format!("kubepods.slice/b/pod2/{}", file.name), "1000\n");
            for (machine, expected) in [("2000\n", "2000"), ("9999\n", "2500")] {
                played.write(&format!("kubepods.slice/{}", file.name), machine);
                played.write(&format!("kiyot/{CELL}/{}", file.name), "100");
                inherit_weights(&played.hierarchies, pods).unwrap();
                assert_eq!(played.read(&format!("kiyot/{}", file.name)), expected);
                assert_eq!(played.of_cell(file.name), "1500");
            }
        }
    }

    #[test]
    fn weight_of_a_cell_has_a_minimum() {
        let played = Played::v1("cpu");
        played.write("kubepods/besteffort/pod1/cpu.shares", "2");
        inherit_weights(&played.hierarchies, [(CELL, "/kubepods/besteffort/pod1")]).unwrap();
        assert_eq!(played.of_cell("cpu.shares"), "102");
    }

    #[test]
    fn cell_without_a_cgroup_of_its_pod_keeps_its_weight() {
        let played = Played::v1("cpu");
        played.write(&format!("kiyot/{CELL}/cpu.shares"), "1024");
        played.write("outside/cpu.shares", "7");
        for parent in ["", "/kubepods/pod2", "/outside/../outside"] {
            inherit_weights(&played.hierarchies, [(CELL, parent)]).unwrap();
            assert_eq!(played.of_cell("cpu.shares"), "1024", "{parent:?}");
        }
    }

    #[test]
    fn removal_of_a_cell_never_raises_the_weight_of_all() {
        let played = Played::v1("cpu");
        played.write("kiyot/cpu.shares", "1024");
        for cell in [CELL, "cell-bbbbbbbbbbbb"] {
            played.write(&format!("kiyot/{cell}/cpu.shares"), "1024");
        }
        lower_parent(&played.hierarchies[0]).unwrap();
        assert_eq!(played.read("kiyot/cpu.shares"), "1024");

        // Cells without the controller have no weights to sum.
        let played = Played::v2("cpu\n");
        played.write("kiyot/cpu.weight", "100");
        lower_parent(&played.hierarchies[0]).unwrap();
        assert_eq!(played.read("kiyot/cpu.weight"), "100");
    }
}
