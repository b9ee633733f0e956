//! Plan of the directories, files and links that a kubelet makes on its node before it calls the
//! runtime.

use std::{net::IpAddr, path::PathBuf};

use super::{Container, Content, KeyedFile, Node, Pod, Volume, VolumeKind, VolumeMount};

/// Modes of pkg/kubelet and pkg/volume.
const DIR_MODE: u32 = 0o755;
const SHARED_DIR_MODE: u32 = 0o777;
const HOSTS_MODE: u32 = 0o644;
const TERMINATION_MESSAGE_MODE: u32 = 0o666;

/// The link by which a volume of files becomes visible, the last that is made of it.
pub(crate) const DATA: &str = "..data";

/// Step of the plan. Existing entries stay, but a link is renamed over an older one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// Directory, with its parents.
    Directory {
        /// Path.
        path: PathBuf,
        /// Permissions, whatever the umask is.
        mode: u32,
    },
    /// File.
    File {
        /// Path.
        path: PathBuf,
        /// Permissions, whatever the umask is.
        mode: u32,
        /// Content.
        content: Content,
    },
    /// Symbolic link, made beside its path and renamed.
    Link {
        /// Path.
        path: PathBuf,
        /// Target, relative to its directory.
        target: PathBuf,
    },
    /// Group of a volume, of all that is in it and of what will be: `fsGroup`
    /// (pkg/volume/volume_linux.go).
    Group {
        /// Path of the volume.
        path: PathBuf,
        /// Group.
        gid: u32,
        /// True if the group may write.
        writable: bool,
    },
}

/// Part of a volume that a container mounts instead of all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubPath {
    /// Path of the volume.
    pub volume: PathBuf,
    /// Path in the volume.
    pub sub_path: String,
    /// Path at which the part is bound.
    pub target: PathBuf,
    /// True if an absent part is made, as a directory.
    pub is_made: bool,
}

impl Pod {
    /// Returns the steps for a sandbox: directories and volumes. Another `revision` updates its
    /// ConfigMaps and Secrets as pkg/volume/util/atomic_writer.go does, but obsolete entries stay.
    /// The kubelet binds subPaths itself.
    pub fn files(&self, node: &Node, revision: u32) -> Vec<Entry> {
        let directory = |path: PathBuf, mode| Entry::Directory { path, mode };
        let mut plan =
            vec![directory(node.pod_dir(self), DIR_MODE), directory(node.log_dir(self), DIR_MODE)];
        let gid = self.security.fs_group.and_then(|gid| u32::try_from(gid).ok());
        let group = |path, writable| gid.map(|gid| Entry::Group { path, gid, writable });
        for volume in &self.volumes {
            let root = volume.host_path(node, self);
            match &volume.kind {
                VolumeKind::EmptyDir { .. } => {
                    plan.push(directory(root.clone(), SHARED_DIR_MODE));
                    plan.extend(group(root, true));
                }
                VolumeKind::ConfigMap(files) | VolumeKind::Secret(files) => {
                    plan.push(directory(root.clone(), SHARED_DIR_MODE));
                    write_atomically(&mut plan, &root, files, revision, group(root.clone(), false));
                }
                // Plugins mount them, and `Purpose::Run` refuses all but hostPath.
                VolumeKind::HostPath(_)
                | VolumeKind::Projected
                | VolumeKind::DownwardApi
                | VolumeKind::Image(_)
                | VolumeKind::Plugin(_) => {}
            }
        }
        plan
    }

    /// Returns the directories that are to be in memory before files are made in them: emptyDirs
    /// with `medium: Memory`, and Secrets. Each with its limit in bytes.
    pub fn memory_dirs(&self, node: &Node) -> Vec<(PathBuf, Option<u64>)> {
        let dir = |volume: &Volume| match volume.kind {
            VolumeKind::EmptyDir { memory: true, size_limit } => {
                Some((volume.host_path(node, self), size_limit))
            }
            VolumeKind::Secret(_) => Some((volume.host_path(node, self), None)),
            _ => None,
        };
        self.volumes.iter().filter_map(dir).collect()
    }

    /// Returns the parts of volumes that a container mounts.
    pub fn sub_paths(&self, container: &Container, node: &Node) -> Vec<SubPath> {
        let part = |(index, mount): (usize, &VolumeMount)| {
            let volume = self.volumes.iter().find(|volume| volume.name == mount.name)?;
            Some(SubPath {
                volume: volume.host_path(node, self),
                sub_path: mount.sub_path.clone()?,
                target: self.sub_path_target(container, node, volume, index),
                is_made: matches!(volume.kind, VolumeKind::EmptyDir { .. }),
            })
        };
        container.mounts.iter().enumerate().filter_map(part).collect()
    }

    /// Returns the path at which the kubelet binds a part of a volume.
    pub(super) fn sub_path_target(
        &self,
        container: &Container,
        node: &Node,
        volume: &Volume,
        index: usize,
    ) -> PathBuf {
        let dir = node.pod_dir(self).join("volume-subpaths").join(&volume.name);
        dir.join(&container.name).join(index.to_string())
    }

    /// Returns the additional steps for a container: `/etc/hosts`, termination message, log
    /// directory.
    pub fn container_files(
        &self,
        container: &Container,
        node: &Node,
        address: Option<IpAddr>,
        attempt: u32,
    ) -> Vec<Entry> {
        let message = self.termination_message_file(container, node, attempt);
        let mut plan = vec![Entry::Directory {
            path: node.log_dir(self).join(&container.name),
            mode: DIR_MODE,
        }];
        plan.extend(
            message
                .parent()
                .map(|parent| Entry::Directory { path: parent.to_owned(), mode: DIR_MODE }),
        );
        plan.push(Entry::File {
            path: message,
            mode: TERMINATION_MESSAGE_MODE,
            content: Content(Vec::new()),
        });
        let content = Content(self.etc_hosts(address).into_bytes());
        plan.push(Entry::File { path: self.etc_hosts_file(node), mode: HOSTS_MODE, content });
        plan
    }

    /// Returns `/etc/hosts` as pkg/kubelet/kubelet_pods.go writes it.
    fn etc_hosts(&self, address: Option<IpAddr>) -> String {
        let own =
            address.map(|address| format!("{address}\t{}\n", self.host_name())).unwrap_or_default();
        format!(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n\
             ::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n\
             fe00::0\tip6-mcastprefix\n\
             fe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n{own}"
        )
    }
}

/// Adds a directory for the revision, a link through `..data` for each first component of a path,
/// the group, and the link `..data` to the directory: a volume that has it is complete.
fn write_atomically(
    plan: &mut Vec<Entry>,
    root: &std::path::Path,
    files: &[KeyedFile],
    revision: u32,
    group: Option<Entry>,
) {
    let revision = PathBuf::from(format!("..2026_01_01_00_00_00.{revision:09}"));
    plan.push(Entry::Directory { path: root.join(&revision), mode: DIR_MODE });
    let mut visible: Vec<PathBuf> = Vec::new();
    for file in files {
        let path = root.join(&revision).join(&file.path);
        let parent = path.parent().filter(|parent| *parent != root.join(&revision));
        plan.extend(
            parent.map(|parent| Entry::Directory { path: parent.to_owned(), mode: DIR_MODE }),
        );
        plan.push(Entry::File { path, mode: file.mode, content: file.content.clone() });
        let first: PathBuf = file.path.split('/').take(1).collect();
        if !visible.contains(&first) {
            visible.push(first);
        }
    }
    plan.extend(visible.into_iter().map(|first| Entry::Link {
        path: root.join(&first),
        target: PathBuf::from(DATA).join(first),
    }));
    plan.extend(group);
    plan.push(Entry::Link { path: root.join(DATA), target: revision });
}
