//! Explanation of variables whose values the kubelet reads on the node: they don't hold on another
//! machine.

use super::Lines;
use crate::{
    config::ProviderKind,
    manifest::{Container, EnvSource, SourceKind},
};

/// Explains the variables of a container in a cell that are absent, or have facts of the node.
pub(super) fn explain(lines: &mut Lines, provider: ProviderKind, container: &Container) {
    let name = &container.name;
    for EnvSource { variable, kind } in &container.env_sources {
        match kind {
            SourceKind::File { is_optional } => {
                let what = format!(
                    "container {name:?} has the variable {variable:?} of a file in a volume \
                     (fileKeyRef), which the kubelet reads on the node, where an emptyDir of a \
                     cell is empty"
                );
                if *is_optional {
                    lines.say(format!("note: {what}: it is optional, and absent"));
                } else {
                    lines.refuse(what);
                }
            }
            SourceKind::Field(path)
                if provider == ProviderKind::Ec2 && path.starts_with("status.hostIP") =>
            {
                lines.say(format!(
                    "note: container {name:?}: {variable} has {path}, which is an address of the \
                     node, not of its instance"
                ));
            }
            SourceKind::Resource(resource)
                if provider != ProviderKind::Netns && lacks_limit(container, resource) =>
            {
                lines.say(format!(
                    "note: container {name:?}: {variable} has {resource}, which without a limit \
                     is what the node can allocate, not its cell"
                ));
            }
            SourceKind::Field(_) | SourceKind::Resource(_) => {}
        }
    }
}

fn lacks_limit(container: &Container, resource: &str) -> bool {
    let resources = &container.resources;
    match resource {
        "limits.cpu" => resources.cpu_limit.is_none(),
        "limits.memory" => resources.memory_limit.is_none(),
        "limits.ephemeral-storage" => resources.storage_limit.is_none(),
        _ => false,
    }
}
