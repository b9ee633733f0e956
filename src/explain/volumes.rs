//! Explanation of the mounts of a container in a cell.

use kiyot_config::{HostPath, MilpaBackend};
use kiyot_manifest::{Container, Pod, VolumeKind};

use super::Lines;

/// Explains the mounts of a container that its cell refuses or copies, and the mounts that need a
/// certain runtime.
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
                let (part, since) = match mount.sub_path {
                    Some(_) => ("a part of ", "2.2"),
                    None => ("", "2.1"),
                };
                lines.say(format!(
                    "note: container {name:?} mounts {part}the image {image:?}, which needs \
                     containerd {since} in the cell"
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
