//! Meaning of a mount's path on the node. Pure.

use std::path::{Component, Path, PathBuf};

use kiyot_linux::tree::beneath;
use kiyot_proto::cell::Root;

use super::plan::CellPath;

/// Plugins whose volumes the kubelet publishes by `..data`.
const ATOMIC_PLUGINS: [&str; 4] = [
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
];

/// Plugins of [`ATOMIC_PLUGINS`] whose volumes are never written to a disk: they have keys and
/// tokens.
const IN_MEMORY_PLUGINS: [&str; 2] = ["kubernetes.io~secret", "kubernetes.io~projected"];

const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// Meaning of a mount's path on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// An emptyDir of the pod.
    EmptyDir {
        /// Name of the volume in the pod.
        name: String,
    },
    /// A volume that the kubelet writes and updates.
    Atomic {
        /// Directory name of the plugin.
        plugin: String,
        /// Name of the volume in the pod.
        name: String,
    },
    /// A part of a volume, bound by the kubelet.
    SubPath {
        /// Name of the volume in the pod.
        volume: String,
        /// Name of the container.
        container: String,
        /// Number of the mount.
        index: String,
    },
    /// `/etc/hosts` of the pod.
    EtcHosts,
    /// Termination message of a container.
    TerminationLog {
        /// Name of the container.
        container: String,
        /// Name of the file, new for each container.
        file: String,
    },
    /// A volume of another plugin of the node: CSI, NFS and so on.
    Plugin {
        /// Directory name of the plugin.
        plugin: String,
    },
    /// Any other path.
    HostPath,
}

impl Source {
    /// Classifies `host_path` for the pod with this UID, whose directory is below a kubelet's
    /// directory.
    pub(super) fn of(kubelet_dirs: &[PathBuf], pod_uid: &str, host_path: &str) -> Self {
        let path = Path::new(host_path);
        let plain = path
            .components()
            .all(|component| matches!(component, Component::RootDir | Component::Normal(_)));
        let rest = kubelet_dirs
            .iter()
            .filter_map(|dir| beneath(&dir.join("pods"), pod_uid).ok())
            .find_map(|dir| path.strip_prefix(dir).ok());
        let Some(rest) = rest.filter(|_| plain && !pod_uid.contains('/')) else {
            return Self::HostPath;
        };
        let names: Vec<&str> =
            rest.components().filter_map(|component| component.as_os_str().to_str()).collect();
        let owned = |name: &str| name.to_owned();
        match names[..] {
            ["etc-hosts"] => Self::EtcHosts,
            ["containers", container, file] => {
                Self::TerminationLog { container: owned(container), file: owned(file) }
            }
            ["volumes", EMPTY_DIR, name] => Self::EmptyDir { name: owned(name) },
            ["volumes", plugin, name] if ATOMIC_PLUGINS.contains(&plugin) => {
                Self::Atomic { plugin: owned(plugin), name: owned(name) }
            }
            ["volumes", plugin, ..] => Self::Plugin { plugin: owned(plugin) },
            ["volume-subpaths", volume, container, index] => Self::SubPath {
                volume: owned(volume),
                container: owned(container),
                index: owned(index),
            },
            _ => Self::HostPath,
        }
    }
}

/// Returns the path of a volume in its cell. `in_memory` is the medium of an emptyDir.
pub(super) fn volume_path(plugin: &str, name: &str, in_memory: bool) -> CellPath {
    let root =
        if in_memory || IN_MEMORY_PLUGINS.contains(&plugin) { Root::Memory } else { Root::Pod };
    if plugin == EMPTY_DIR {
        CellPath::new(root, format!("empty-dir/{name}"))
    } else {
        CellPath::new(root, format!("volumes/{plugin}/{name}"))
    }
}

pub(super) fn empty_dir_path(name: &str, in_memory: bool) -> CellPath {
    volume_path(EMPTY_DIR, name, in_memory)
}

/// Returns whether a plugin's volumes are emptyDirs.
pub(super) fn is_empty_dir(plugin: &str) -> bool {
    plugin == EMPTY_DIR
}

/// Returns whether the kubelet writes a plugin's volumes.
pub(super) fn is_atomic(plugin: &str) -> bool {
    ATOMIC_PLUGINS.contains(&plugin)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(path: &str) -> Source {
        Source::of(&["/var/lib/kubelet".into(), "/data/kubelet/".into()], "u-1", path)
    }

    #[test]
    fn kubelet_paths_have_their_source() {
        let pod = "/var/lib/kubelet/pods/u-1";
        let atomic = |plugin: &str| Source::Atomic { plugin: plugin.into(), name: "v".into() };
        for (path, source) in [
            ("etc-hosts", Source::EtcHosts),
            (
                "containers/c/01234567",
                Source::TerminationLog { container: "c".into(), file: "01234567".into() },
            ),
            ("volumes/kubernetes.io~empty-dir/v", Source::EmptyDir { name: "v".into() }),
            ("volumes/kubernetes.io~secret/v", atomic("kubernetes.io~secret")),
            ("volumes/kubernetes.io~projected/v", atomic("kubernetes.io~projected")),
            ("volumes/kubernetes.io~configmap/v/", atomic("kubernetes.io~configmap")),
            (
                "volumes/kubernetes.io~csi/pv/mount",
                Source::Plugin { plugin: "kubernetes.io~csi".into() },
            ),
            ("volumes/kubernetes.io~nfs/v", Source::Plugin { plugin: "kubernetes.io~nfs".into() }),
            (
                "volume-subpaths/v/c/0",
                Source::SubPath { volume: "v".into(), container: "c".into(), index: "0".into() },
            ),
            ("volumes/kubernetes.io~secret/v/../../x", Source::HostPath),
            ("plugins", Source::HostPath),
            ("", Source::HostPath),
        ] {
            assert_eq!(of(&format!("{pod}/{path}")), source, "{path}");
        }
        assert_eq!(of("/data/kubelet/pods/u-1/etc-hosts"), Source::EtcHosts);
    }

    #[test]
    fn other_paths_are_host_paths() {
        for path in [
            "/",
            "/etc",
            "relative",
            "",
            "/var/lib/kubelet/pods/other/volumes/kubernetes.io~secret/v",
            "/var/lib/kubelet/pods/u-1x/etc-hosts",
        ] {
            assert_eq!(of(path), Source::HostPath, "{path}");
        }
        assert_eq!(Source::of(&["/k".into()], "..", "/k/pods/../etc-hosts"), Source::HostPath);
        assert_eq!(Source::of(&["/k".into()], "", "/k/pods/etc-hosts"), Source::HostPath);
    }

    #[test]
    fn secret_volumes_are_in_memory() {
        assert_eq!(
            volume_path("kubernetes.io~secret", "s", false),
            CellPath::new(Root::Memory, "volumes/kubernetes.io~secret/s")
        );
        assert_eq!(volume_path("kubernetes.io~configmap", "s", false).root, Root::Pod);
        assert_eq!(empty_dir_path("e", true), CellPath::new(Root::Memory, "empty-dir/e"));
        assert_eq!(empty_dir_path("e", false).root, Root::Pod);
    }

    proptest! {
        #[test]
        fn arbitrary_paths_do_not_panic(uid in ".{0,8}", path in ".{0,60}") {
            let _ = Source::of(&["/k".into()], &uid, &path);
            let _ = Source::of(&["/k".into()], &uid, &format!("/k/pods/{uid}/{path}"));
        }
    }
}
