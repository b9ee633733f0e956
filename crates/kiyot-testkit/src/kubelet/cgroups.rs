//! The control groups of pods, as a kubelet makes and removes them.

use std::{env, fs};

use super::{Directories, Pod};
use crate::command;

/// The variable that names the cgroup driver of a machine's containerds and kubelets: `systemd`,
/// or, without it, `cgroupfs`.
const DRIVER: &str = "KIYOT_TEST_CGROUP_DRIVER";

/// Creates control groups: the runtime and the kubelet of a node have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupDriver {
    /// runc and the kubelet make directories.
    Cgroupfs,
    /// Both ask systemd for units.
    Systemd,
}

impl CgroupDriver {
    /// The driver that this machine is tested with.
    pub fn of_machine() -> Self {
        match env::var(DRIVER).as_deref() {
            Ok("systemd") => Self::Systemd,
            _ => Self::Cgroupfs,
        }
    }
}

/// Returns a pod's `cgroup_parent`. All pods here are "best effort".
pub(super) fn parent(directories: &Directories, pod: &Pod) -> String {
    let all = &directories.cgroup;
    match directories.driver {
        CgroupDriver::Cgroupfs => format!("/{all}/besteffort/pod{}", pod.uid),
        // Dashes part what systemd nests.
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

/// Makes a pod's control group as a kubelet does before it runs the sandbox. Directories are made
/// by the runtime, too: only systemd must be asked.
pub(super) fn make(directories: &Directories, pod: &Pod) {
    if directories.driver == CgroupDriver::Systemd {
        // As libcontainer does for a kubelet (cgroups/systemd/v2.go).
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
        // A later attempt of the pod has the same one.
        if let Err(error) = command::output("busctl", &arguments) {
            assert!(error.contains("already loaded"), "{error}");
        }
    }
}

/// Removes a pod's control group as a kubelet does.
pub(super) fn remove(directories: &Directories, pod: &Pod) {
    if directories.driver == CgroupDriver::Systemd {
        let _ = command::output("systemctl", &["stop", &unit(directories, pod)]);
    }
    let group = parent(directories, pod);
    for cgroup in crate::leftovers::cgroups().iter().rev().filter(|path| path.contains(&group)) {
        let _ = fs::remove_dir(cgroup);
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
