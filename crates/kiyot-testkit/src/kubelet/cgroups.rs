//! Cgroups of pods, as a kubelet creates and removes them.

use std::{env, fs, path::Path};

use super::{Directories, Pod};
use crate::{
    command,
    leftovers::{CGROUPS, directories_below},
};

/// The variable with the cgroup driver of this machine's containerds and kubelets: `systemd`, or
/// `cgroupfs` if unset.
const DRIVER: &str = "KIYOT_TEST_CGROUP_DRIVER";

/// The cgroup driver. A node's runtime and kubelet have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// runc and the kubelet create directories.
    Cgroupfs,
    /// runc and the kubelet request units from systemd.
    Systemd,
}

impl CgroupDriver {
    /// Returns the driver of this machine.
    pub fn of_machine() -> Self {
        match env::var(DRIVER).as_deref() {
            Ok("systemd") => Self::Systemd,
            _ => Self::Cgroupfs,
        }
    }
}

/// Returns a pod's `cgroup_parent`, with the QoS class BestEffort.
pub(super) fn parent(directories: &Directories, pod: &Pod) -> String {
    let all = &directories.cgroup;
    match directories.driver {
        CgroupDriver::Cgroupfs => format!("/{all}/besteffort/pod{}", pod.uid),
        // systemd nests slices at dashes.
        CgroupDriver::Systemd => {
            slice(&format!("{all}-besteffort-pod{}", pod.uid.replace('-', "_")))
        }
    }
}

/// Returns the path of a slice beneath the root (systemd.slice(5)).
fn slice(name: &str) -> String {
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    ends.fold(String::new(), |path, end| format!("{path}/{}.slice", &name[..end]))
}

/// Creates a pod's slice, as a kubelet does before RunPodSandbox. With cgroupfs the runtime creates
/// the directories.
pub(super) fn create(directories: &Directories, pod: &Pod) {
    if directories.driver == CgroupDriver::Systemd {
        // The properties that libcontainer sets for a kubelet (cgroups/systemd/v2.go).
        let accounting: Vec<String> =
            ["MemoryAccounting", "CPUAccounting", "IOAccounting", "TasksAccounting"]
                .iter()
                .flat_map(|property| [property, "b", "true"])
                .map(str::to_owned)
                .collect();
        let unit = unit(directories, pod);
        let mut arguments = vec![
            "call",
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
            "StartTransientUnit",
            "ssa(sv)a(sa(sv))",
            &unit,
            "replace",
            "4",
        ];
        arguments.extend(accounting.iter().map(String::as_str));
        arguments.push("0");
        // A later attempt of the pod has the same slice.
        if let Err(error) = command::output("busctl", &arguments) {
            assert!(error.contains("already loaded"), "{error}");
        }
    }
}

/// Removes a pod's cgroup, as a kubelet does.
pub(super) fn remove(directories: &Directories, pod: &Pod) {
    if directories.driver == CgroupDriver::Systemd {
        let _ = command::output("systemctl", &["stop", &unit(directories, pod)]);
    }
    let group = parent(directories, pod);
    let root = Path::new(CGROUPS);
    // Version 2 is mounted here or, if version 1 is present, below.
    let below = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    for hierarchy in below.chain([root.to_owned()]) {
        let group = hierarchy.join(group.trim_start_matches('/'));
        if group.is_dir() {
            for cgroup in directories_below(&group).iter().rev() {
                let _ = fs::remove_dir(cgroup);
            }
            let _ = fs::remove_dir(&group);
        }
    }
}

fn unit(directories: &Directories, pod: &Pod) -> String {
    let parent = parent(directories, pod);
    parent.rsplit('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_nest_at_each_dash() {
        assert_eq!(slice("a-b-pod1_2"), "/a.slice/a-b.slice/a-b-pod1_2.slice");
    }
}
