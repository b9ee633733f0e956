//! Explanation of variables, and of files of the downward API, whose values the kubelet reads on
//! the node: they don't hold on another machine.

use kiyot_config::ProviderKind;
use kiyot_manifest::{Container, EnvSource, Pod, ResourceField, SourceKind};

use super::Lines;

/// Explains the variables of a container in a cell that are absent, or have facts of the node.
pub(super) fn explain(lines: &mut Lines, provider: ProviderKind, pod: &Pod, container: &Container) {
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
                if provider != ProviderKind::Netns
                    && lacks_limit(pod, resource, Some(container)) =>
            {
                note_resource(lines, &format!("container {name:?}: {variable}"), resource);
            }
            SourceKind::Field(_) | SourceKind::Resource(_) => {}
        }
    }
}

/// Explains the files of volumes that have facts of the node.
pub(super) fn explain_files(lines: &mut Lines, provider: ProviderKind, pod: &Pod) {
    if provider == ProviderKind::Netns {
        return;
    }
    for volume in &pod.volumes {
        for (path, resource) in &volume.resource_files {
            if lacks_limit(pod, resource, None) {
                note_resource(lines, &format!("volume {:?}: {path}", volume.name), resource);
            }
        }
    }
}

fn note_resource(
    lines: &mut Lines,
    what: &str,
    ResourceField { container, resource }: &ResourceField,
) {
    let of = container.as_ref().map(|name| format!(" of container {name:?}")).unwrap_or_default();
    lines.say(format!(
        "note: {what} has {resource}{of}, which without a limit is what the node can allocate, not \
         its cell"
    ));
}

/// Returns whether the container of a resource, by default the own one, has no limit of it.
fn lacks_limit(pod: &Pod, field: &ResourceField, own: Option<&Container>) -> bool {
    let container = match &field.container {
        Some(name) => pod.all_containers().find(|container| container.name == *name),
        None => own,
    };
    let Some(container) = container else { return false };
    let resources = &container.resources;
    match &*field.resource {
        "limits.cpu" => resources.cpu_limit.is_none(),
        "limits.memory" => resources.memory_limit.is_none(),
        "limits.ephemeral-storage" => resources.storage_limit.is_none(),
        _ => false,
    }
}
