//! Our slice beneath a pod's slice, for the cgroup driver `systemd` with the controllers of version
//! 2.
//!
//! A cell's runc makes the cgroups of containers itself, in the directory of the pod's slice.
//! systemd knows of no unit there that needs a controller. At its next check, for example at
//! `systemctl daemon-reload`, it takes the controllers away from the slice's children: the
//! containers' limits and usage would be lost. Our slice beneath the pod's needs the controllers
//! and has no processes. It ends with the pod's slice, or with the cell.

use std::path::Path;

use kiyot_engine::provider::ProviderError;

use crate::{
    cgroup::Hierarchy,
    command::{self, CommandError},
    instance::Home,
};

/// A directory that exists if systemd is the first process (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";
/// The end of our slice's name.
const SUFFIX: &str = "-kiyot.slice";
/// Bounds a unit's name, in bytes (systemd, UNIT_NAME_MAX).
const MAX_NAME_BYTES: usize = 255;
/// The bus name, object and interface of systemd (org.freedesktop.systemd1(5)).
const MANAGER: [&str; 4] = [
    "call",
    "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1.Manager",
];
/// A property for each controller that systemd knows: processor, memory, disks, numbers of
/// processes, and sets of processors. They limit nothing.
const PROPERTIES: [&str; 17] = [
    "5",
    "CPUWeight",
    "t",
    "100",
    "MemoryAccounting",
    "b",
    "true",
    "IOAccounting",
    "b",
    "true",
    "TasksAccounting",
    "b",
    "true",
    "AllowedCPUs",
    "ay",
    "1",
    "1",
];

/// Makes our slice beneath a pod's, before the pod has containers. May be repeated.
pub(crate) async fn keep_controllers(
    home: &Home,
    hierarchies: &[Hierarchy],
    cgroup_parent: &str,
) -> Result<(), ProviderError> {
    let Some(holder) = holder(cgroup_parent).filter(|_| needs_holder(hierarchies)) else {
        return Ok(());
    };
    start_unit(&holder, Some(home.dir())).await
}

/// Makes the slice of a pod, with the controllers of its parents. Succeeds if the slice exists, or
/// if the pod's cgroup needs no slice.
pub(super) async fn start(
    hierarchies: &[Hierarchy],
    cgroup_parent: &str,
) -> Result<(), ProviderError> {
    match slice(cgroup_parent).filter(|_| needs_holder(hierarchies)) {
        Some(slice) => start_unit(&format!("{slice}.slice"), None).await,
        None => Ok(()),
    }
}

async fn start_unit(unit: &str, instance: Option<&Path>) -> Result<(), ProviderError> {
    let start = ["StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "replace"];
    let arguments = [&start[..], &PROPERTIES, &["0"]].concat();
    call(&arguments, instance, "already loaded", format!("make the slice {unit}")).await
}

/// Calls systemd. A refusal whose text contains `done` counts as success.
async fn call(
    arguments: &[&str],
    instance: Option<&Path>,
    done: &str,
    doing: String,
) -> Result<(), ProviderError> {
    let arguments = [&MANAGER, arguments].concat();
    match command::succeed("busctl", &arguments, instance).await {
        Err(CommandError::Refused { said, .. }) if said.contains(done) => Ok(()),
        called => called.map_err(|error| ProviderError::transient(doing, error)),
    }
}

/// Removes our slice. Succeeds if it is absent.
pub(super) async fn release(
    home: &Home,
    hierarchies: &[Hierarchy],
    cgroup_parent: &str,
) -> Result<(), ProviderError> {
    let Some(holder) = holder(cgroup_parent).filter(|_| needs_holder(hierarchies)) else {
        return Ok(());
    };
    let arguments = ["StopUnit", "ss", &holder, "replace"];
    call(&arguments, Some(home.dir()), "not loaded", format!("end the slice {holder}")).await
}

/// Returns whether systemd decides here which cgroups have controllers.
fn needs_holder(hierarchies: &[Hierarchy]) -> bool {
    Path::new(BOOTED).is_dir() && hierarchies.iter().all(Hierarchy::is_v2)
}

/// Returns the name of our slice beneath a pod's slice, if the pod has a slice.
fn holder(cgroup_parent: &str) -> Option<String> {
    slice(cgroup_parent).map(|slice| format!("{slice}{SUFFIX}"))
}

/// Returns the name of a pod's slice without its suffix; `None` if the pod has no slice, or the
/// name of our slice beneath it would be too long.
fn slice(cgroup_parent: &str) -> Option<&str> {
    let slice = cgroup_parent.trim_end_matches('/').rsplit('/').next()?.strip_suffix(".slice")?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b":_.\\-@".contains(&byte);
    let good = !slice.is_empty() && !slice.starts_with('-') && slice.bytes().all(plain);
    (good && slice.len() + SUFFIX.len() <= MAX_NAME_BYTES).then_some(slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slice_of_a_pod_has_a_holder_beneath_it() {
        let slice = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podu_1.slice";
        for asked in [slice.to_owned(), format!("{slice}/")] {
            assert_eq!(holder(&asked).unwrap(), "kubepods-besteffort-podu_1-kiyot.slice");
        }
    }

    #[test]
    fn other_cgroups_have_no_holder() {
        let long = format!("/{}.slice", "a".repeat(MAX_NAME_BYTES));
        for asked in
            ["", "/", "/kubepods/podu", "/.slice", "/-.slice", "/a b.slice", "/a\n.slice", &long]
        {
            assert_eq!(holder(asked), None, "{asked:?}");
        }
    }
}
