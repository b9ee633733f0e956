//! Explanation of variables, and of files of the downward API. The kubelet reads their values on
//! the node, so that the values are wrong for another machine.

use kiyot_config::ProviderKind;
use kiyot_manifest::{Container, EnvSource, Pod, ResourceField, SourceKind};

use super::{Lines, Target};

/// Explains the variables of a container in a cell that are absent or describe the node.
pub(super) fn explain(lines: &mut Lines, target: &Target<'_>, pod: &Pod, container: &Container) {
    let provider = target.provider;
    let name = &container.name;
    for EnvSource { variable, kind } in &container.env_sources {
        match kind {
            SourceKind::File { is_optional } => {
                let what = format!(
                    "container {name:?} has the variable {variable:?} of a file in a volume \
                     (fileKeyRef): the kubelet reads the file on the node, where an emptyDir of a \
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
                if lacks_limit(pod, resource, Some(container))
                    && !is_replaced(target, resource) =>
            {
                let what = format!("container {name:?}: {variable}");
                note_resource(lines, target, &what, resource);
            }
            SourceKind::Field(_) | SourceKind::Resource(_) => {}
        }
    }
}

/// Returns whether a variable or file gets the figure of its cell.
fn is_replaced(target: &Target<'_>, field: &ResourceField) -> bool {
    target.config.kubernetes.reads_requests()
        && target.provider != ProviderKind::Netns
        && ["limits.cpu", "limits.memory"].contains(&&*field.resource)
}

/// Explains the files of volumes that describe the node.
pub(super) fn explain_files(lines: &mut Lines, target: &Target<'_>, pod: &Pod) {
    for volume in &pod.volumes {
        for (path, resource) in &volume.resource_files {
            if lacks_limit(pod, resource, None) && !is_replaced(target, resource) {
                let what = format!("volume {:?}: {path}", volume.name);
                note_resource(lines, target, &what, resource);
            }
        }
    }
}

/// Notes a limit that the kubelet fills in. Cells of netns have what the node can allocate, unless
/// the node declares another figure.
fn note_resource(
    lines: &mut Lines,
    target: &Target<'_>,
    what: &str,
    ResourceField { container, resource }: &ResourceField,
) {
    let capacity = target.config.kubernetes.capacity.as_ref();
    let is_declared = resource
        .strip_prefix("limits.")
        .is_some_and(|name| capacity.is_some_and(|capacity| capacity.declares(name)));
    if target.provider == ProviderKind::Netns && !is_declared {
        return;
    }
    let of = container.as_ref().map(|name| format!(" of container {name:?}")).unwrap_or_default();
    let filled_in = if is_declared { "the node declares" } else { "the node can allocate" };
    lines.say(format!(
        "note: {what} has {resource}{of}: without a limit it is the amount that {filled_in}, not \
         the amount of its cell"
    ));
}

/// Returns whether the container of a field has no limit of the field's resource. A field without a
/// container means `own`.
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
