//! Access to the kernel that a container requests without being privileged.

use std::fmt;

use kiyot_proto::{cri, kernel_paths};

use super::capabilities::{self, Reach};

/// Label that a kubelet gives each container (pkg/kubelet/kuberuntime/labels.go).
const KUBELET_LABEL: &str = "io.kubernetes.container.name";
/// Longest part of a capability's name that an error repeats, in characters.
const MAX_SHOWN_CHARACTERS: usize = 64;

/// A power over the kernel that `privileged` includes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KernelAccess {
    /// A capability that the namespaces of a cell do not contain, as the request names it.
    Capability(String),
    /// `/proc` with writable kernel parameters (`procMount: Unmasked`): root may write
    /// `kernel.core_pattern`, and the node runs the program named there.
    UnmaskedProc,
}

impl fmt::Display for KernelAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capability(name) => write!(f, "the capability {name}"),
            Self::UnmaskedProc => f.write_str("an unmasked /proc (procMount: Unmasked)"),
        }
    }
}

/// Returns the first access to the kernel that a container requests; `None` for a privileged
/// container, which has all access.
pub(super) fn requested(config: &cri::ContainerConfig) -> Option<KernelAccess> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    if context.privileged {
        return None;
    }
    let capability = added(context).find(|name| capabilities::reach(name) == Reach::Kernel);
    capability
        .map(|name| KernelAccess::Capability(displayed(name)))
        .or_else(|| is_unmasked(config, context).then_some(KernelAccess::UnmaskedProc))
}

/// Returns whether a kubelet requests `procMount: Unmasked`. A kubelet sends both lists of paths
/// for every other container; empty lists of another client mean nothing.
fn is_unmasked(
    config: &cri::ContainerConfig,
    context: &cri::LinuxContainerSecurityContext,
) -> bool {
    config.labels.contains_key(KUBELET_LABEL)
        && context.masked_paths.is_empty()
        && context.readonly_paths.is_empty()
}

/// Adds the absent paths by which root of a container reaches the kernel.
pub(super) fn close_paths(context: &mut cri::LinuxContainerSecurityContext) {
    for (list, paths) in [
        (&mut context.masked_paths, &kernel_paths::MASKED[..]),
        (&mut context.readonly_paths, &kernel_paths::READ_ONLY[..]),
    ] {
        let absent = paths.iter().filter(|path| !list.iter().any(|listed| listed == *path));
        let absent: Vec<_> = absent.map(|path| (*path).to_owned()).collect();
        list.extend(absent);
    }
}

/// Returns the first capability by which a container reaches the open files of the processes that
/// it sees.
pub(super) fn into_processes(context: &cri::LinuxContainerSecurityContext) -> Option<String> {
    let reaches = |name: &&str| {
        capabilities::is_all(name) || capabilities::reach(name) == Reach::OwnProcesses
    };
    added(context).find(reaches).map(displayed)
}

fn added(context: &cri::LinuxContainerSecurityContext) -> impl Iterator<Item = &str> {
    context
        .capabilities
        .iter()
        .flat_map(|all| all.add_capabilities.iter().chain(&all.add_ambient_capabilities))
        .map(String::as_str)
}

fn displayed(name: &str) -> String {
    name.chars().take(MAX_SHOWN_CHARACTERS).flat_map(char::escape_debug).collect()
}
