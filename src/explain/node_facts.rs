//! Explanation of variables by which a kubelet tells a pod of its node: they don't hold on another
//! machine.

use super::Lines;
use crate::{
    config::ProviderKind,
    manifest::{Container, EnvSource},
};

/// Notes the variables of a container that have facts of the node in a cell of another machine.
pub(super) fn note(lines: &mut Lines, provider: ProviderKind, container: &Container) {
    for EnvSource { variable, kind, of } in &container.env_sources {
        let resources = &container.resources;
        let limit = match &**of {
            "limits.cpu" => resources.cpu_limit,
            "limits.memory" => resources.memory_limit,
            "limits.ephemeral-storage" => resources.storage_limit,
            _ => Some(0),
        };
        let what = match (*kind, provider) {
            ("resourceFieldRef", ProviderKind::Qemu | ProviderKind::Ec2) if limit.is_none() => {
                format!("{of}, which without a limit is what the node can allocate, not its cell")
            }
            ("fieldRef", ProviderKind::Ec2) if of.starts_with("status.hostIP") => {
                format!("{of}, which is an address of the node, not of its instance")
            }
            _ => continue,
        };
        lines.say(format!("note: container {:?}: {variable} has {what}", container.name));
    }
}
