//! Explanation of the mounts of a container in a cell, and of its variables in files of volumes.

use super::Lines;
use crate::{
    config::{HostPath, MilpaBackend},
    manifest::{Container, Pod, VolumeKind},
};

/// Explains variables that the kubelet reads from files of volumes (`fileKeyRef`).
pub(super) fn explain_variables(lines: &mut Lines, container: &Container) {
    for (variable, is_optional) in &container.env_in_files {
        let what = format!(
            "container {:?} has the variable {variable:?} of a file in a volume (fileKeyRef), \
             which the kubelet reads on the node, where an emptyDir of a cell is empty",
            container.name
        );
        if *is_optional {
            lines.say(format!("note: {what}: it is optional, and absent"));
        } else {
            lines.refuse(what);
        }
    }
}

/// Explains the mounts that a cell refuses, copies or needs a certain runtime for.
pub(super) fn explain(lines: &mut Lines, milpa: &MilpaBackend, pod: &Pod, container: &Container) {
    let name = &container.name;
    for mount in &container.mounts {
        let Some(volume) = pod.volumes.iter().find(|volume| volume.name == mount.name) else {
            continue;
        };
        let path = &mount.mount_path;
        if mount.recursive_read_only {
            lines.say(format!(
                "note: container {name:?} mounts {path} recursively read-only, which needs \
                 containerd 2.0 in the cell"
            ));
        }
        let (what, read_only) = match &volume.kind {
            VolumeKind::HostPath(host) => (host.path.clone(), mount.read_only),
            VolumeKind::Plugin(plugin) => (
                format!("the volume {:?} ({})", volume.name, plugin.source),
                mount.read_only || plugin.read_only,
            ),
            VolumeKind::Image(image) => {
                lines.say(format!(
                    "note: container {name:?} mounts the image {image:?}, which needs containerd \
                     2.1 in the cell"
                ));
                continue;
            }
            _ => continue,
        };
        match milpa.policy.host_path {
            HostPath::Refuse => lines.refuse(format!(
                "container {name:?} mounts {what} of the node, and policy.host_path is \"refuse\""
            )),
            HostPath::CopyReadOnly if !read_only => lines.refuse(format!(
                "container {name:?} mounts {what} of the node writable, and policy.host_path \
                 allows read-only copies"
            )),
            HostPath::CopyReadOnly => lines.say(format!(
                "note: container {name:?} gets a copy of {what}, made with the container"
            )),
        }
    }
}
