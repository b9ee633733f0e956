//! Copies of a container's mounts, made in its cell.

use std::path::{Path, PathBuf};

use kiyot_config::HostPath;
use kiyot_linux::tree::beneath;
use kiyot_proto::{
    cell::{FileChange, MountTmpfs, Root, file_change::Change},
    cri,
};
use ring::digest::{SHA256, digest};
use rustix::fs::{fstat, fstatfs};

use super::{
    plan::{CellPath, plan},
    pod::PodVolumes,
    reader::{self, FileOrTree, ReadError},
    replaced::replace_in_part,
    sources::{self, Source},
    subpath,
    tree::{Attributes, CopyState},
    volume_sync::{Synced, VolumeError},
};
use crate::backends::milpa::failure::{Code, Failure};

/// File system types of `statfs(2)`.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Copies the mounts of a container into its cell.
#[derive(Debug)]
pub(super) struct Preparation<'a> {
    pub(super) kubelet_dirs: &'a [PathBuf],
    pub(super) host_path: HostPath,
    /// UID of the pod.
    pub(super) uid: &'a str,
    /// Name of the container.
    pub(super) container: &'a str,
    pub(super) pod: &'a PodVolumes,
}

/// Root of an emptyDir on the node.
#[derive(Debug)]
struct Medium {
    attributes: Attributes,
    /// Size of the tmpfs in bytes, 0 for unlimited; `None` for a disk.
    memory: Option<u64>,
}

impl Preparation<'_> {
    /// Copies a mount into the cell and returns its path there.
    pub(super) async fn mount(&self, mount: &cri::Mount) -> Result<String, Failure> {
        let path = Path::new(&mount.host_path);
        let place = match Source::of(self.kubelet_dirs, self.uid, &mount.host_path) {
            Source::EmptyDir { name } => self.empty_dir(path, &name).await?,
            Source::Atomic { plugin, name } => {
                self.atomic(path, sources::volume_path(&plugin, &name, false)).await?
            }
            Source::SubPath { volume, container, index } => {
                self.sub_path(
                    path,
                    mount,
                    &volume,
                    &format!("volume-subpaths/{volume}/{container}/{index}"),
                )
                .await?
            }
            Source::EtcHosts => {
                self.copy(path, CellPath::new(Root::Pod, "etc-hosts"), true, true).await?
            }
            Source::TerminationLog { container, file } => {
                self.termination_log(CellPath::new(
                    Root::Pod,
                    format!("containers/{container}/{file}"),
                ))
                .await?
            }
            Source::Plugin { plugin } => {
                self.host_path_mount(path, mount, &format!("of the plugin {plugin}")).await?
            }
            Source::HostPath => self.host_path_mount(path, mount, "of the node").await?,
        };
        self.pod.files().path(&place).await
    }

    /// Synchronises a volume that the kubelet writes.
    async fn atomic(&self, path: &Path, place: CellPath) -> Result<CellPath, Failure> {
        let volume = self.pod.volume(path.to_owned(), place.clone());
        match volume.sync(&*self.pod.files(), self.pod.replaced()).await {
            Ok(Synced::Retained) => {
                tracing::warn!(
                    volume = %path.display(),
                    "volume unknown on the node, container gets the retained copy"
                );
            }
            Ok(_) => {}
            Err(VolumeError::Cell { path, source }) => return Err(cell_failure(&path, source)),
            Err(VolumeError::Read { source, .. }) => return Err(read_failure(path, &source)),
        }
        Ok(place)
    }

    /// Makes an emptyDir, unless it exists, with the root's mode and owner on the node.
    async fn empty_dir(&self, path: &Path, name: &str) -> Result<CellPath, Failure> {
        let medium = blocking({
            let path = path.to_owned();
            move || medium(&path)
        })
        .await?;
        let place = sources::empty_dir_path(name, medium.memory.is_some());
        let Attributes { mode, uid, gid } = medium.attributes;
        let mut changes: Vec<FileChange> = place.parent_directory().into_iter().collect();
        changes.push(place.directory(medium.attributes, true));
        if let Some(size_bytes) = medium.memory {
            changes.push(place.change(Change::MountTmpfs(MountTmpfs {
                mode,
                uid,
                gid,
                size_bytes,
                keep: true,
            })));
        }
        self.change(path, changes).await?;
        Ok(place)
    }

    /// Returns the part of a volume that the kubelet has bound: for an emptyDir, the same part of
    /// the cell's emptyDir, otherwise a copy. As on a node, the copy is never updated.
    async fn sub_path(
        &self,
        path: &Path,
        mount: &cri::Mount,
        volume: &str,
        at: &str,
    ) -> Result<CellPath, Failure> {
        let Some((plugin, volume_path)) = self.plugin_of(volume).await? else {
            return self.host_path_mount(path, mount, "of the node").await;
        };
        if sources::is_atomic(&plugin) {
            let root = sources::volume_path(&plugin, volume, false).root;
            let mut node = read(path, true).await?;
            let replaced = self.pod.replaced();
            if replaced.iter().any(|file| file.volume == volume)
                && let Some(below) = part(&volume_path, path).await?
            {
                replace_in_part(&mut node, volume, &below, &replaced);
            }
            return self.write(path, CellPath::new(root, at), node, false).await;
        }
        if !sources::is_empty_dir(&plugin) {
            return self.host_path_mount(path, mount, &format!("of the plugin {plugin}")).await;
        }
        let below = part(&volume_path, path).await?.ok_or_else(|| {
            Failure::request(
                Code::FailedPrecondition,
                format!(
                    "{}: it is not bound to a path in {}",
                    path.display(),
                    volume_path.display()
                ),
            )
        })?;
        let attributes = blocking({
            let path = path.to_owned();
            move || Ok(medium(&path)?.attributes)
        })
        .await?;
        let place = self.empty_dir(&volume_path, volume).await?;
        let (source, target) = (place.below(&below), CellPath::new(place.root, at));
        let mut changes = Vec::new();
        if !below.is_empty() {
            // The kubelet makes a directory if the path is absent. In the cell, the path may be an
            // entry of a container, which stays.
            changes.extend(source.parent_directory());
            changes.push(source.directory(attributes, true));
        }
        changes.extend(target.parent_directory());
        // The agent binds it and follows no link, because the pod controls the path.
        changes.push(target.change(Change::Bind(source.path.clone())));
        self.change(path, changes).await?;
        Ok(target)
    }

    /// Returns the plugin of a volume with this name in the pod, and the volume's path.
    async fn plugin_of(&self, volume: &str) -> Result<Option<(String, PathBuf)>, Failure> {
        let candidates: Vec<PathBuf> = self
            .kubelet_dirs
            .iter()
            .filter_map(|dir| Some(beneath(&dir.join("pods"), self.uid).ok()?.join("volumes")))
            .collect();
        let volume = volume.to_owned();
        blocking(move || {
            let plugins =
                candidates.iter().filter_map(|dir| dir.read_dir().ok()).flatten().flatten();
            Ok(plugins
                .filter_map(|plugin| {
                    let path = beneath(&plugin.path(), &volume).ok()?;
                    Some((plugin.file_name().into_string().ok()?, path))
                })
                .find(|(_, path)| path.is_dir()))
        })
        .await
    }

    /// Makes an empty file for a container's termination message, writable by everyone.
    async fn termination_log(&self, place: CellPath) -> Result<CellPath, Failure> {
        let mut changes: Vec<FileChange> = place.parent_directory().into_iter().collect();
        changes
            .extend(place.file(Attributes { mode: 0o666, uid: 0, gid: 0 }, &bytes::Bytes::new()));
        self.change(Path::new(&place.path), changes).await?;
        Ok(place)
    }

    /// Refuses or copies a node path, by policy.
    async fn host_path_mount(
        &self,
        path: &Path,
        mount: &cri::Mount,
        origin: &str,
    ) -> Result<CellPath, Failure> {
        let refused = |policy: &str| {
            Err(Failure::request(
                Code::FailedPrecondition,
                format!(
                    "container {:?} mounts {} at {}: a path {origin} is not available \
                 in a cell ({policy}); allowed are emptyDir, configMap, secret, projected and \
                 downwardAPI",
                    self.container,
                    path.display(),
                    mount.container_path,
                ),
            ))
        };
        match self.host_path {
            HostPath::Refuse => refused("policy host_path = \"refuse\""),
            HostPath::CopyReadOnly if !mount.readonly => {
                refused("policy host_path = \"copy-read-only\", and this mount is writable")
            }
            HostPath::CopyReadOnly => {
                let name = hex::encode(&digest(&SHA256, mount.host_path.as_bytes()).as_ref()[..16]);
                // Each container has its own copy, so that a new container changes nothing for the
                // others.
                self.copy(
                    path,
                    CellPath::new(Root::Pod, format!("host-paths/{}/{name}", self.container)),
                    false,
                    false,
                )
                .await
            }
        }
    }

    /// Copies a file or a tree once. The copy of an earlier attempt is removed first. A `shared`
    /// file, which other containers have mounted, is written in place instead, as by the kubelet.
    async fn copy(
        &self,
        path: &Path,
        place: CellPath,
        no_follow: bool,
        shared: bool,
    ) -> Result<CellPath, Failure> {
        self.write(path, place, read(path, no_follow).await?, shared).await
    }

    async fn write(
        &self,
        path: &Path,
        place: CellPath,
        node: FileOrTree,
        shared: bool,
    ) -> Result<CellPath, Failure> {
        let mut changes: Vec<FileChange> = place.parent_directory().into_iter().collect();
        if !shared {
            changes.push(place.change(Change::Remove(true)));
        }
        match node {
            FileOrTree::File(attributes, content) if shared => {
                changes.extend(place.file_in_place(attributes, &content))
            }
            FileOrTree::File(attributes, content) => {
                changes.extend(place.file(attributes, &content))
            }
            FileOrTree::Tree(tree) => changes.extend(plan(&CopyState::default(), &tree, &place)),
        }
        self.change(path, changes).await?;
        Ok(place)
    }

    async fn change(&self, path: &Path, changes: Vec<FileChange>) -> Result<(), Failure> {
        self.pod.files().change(changes).await.map_err(|failure| cell_failure(path, failure))
    }
}

async fn read(path: &Path, no_follow: bool) -> Result<FileOrTree, Failure> {
    let path = path.to_owned();
    blocking(move || {
        reader::read_node(&path, no_follow).map_err(|error| read_failure(&path, &error))
    })
    .await
}

/// Returns the path below `volume` of the part that the kubelet has bound to `path`; `None` if no
/// part of the volume is bound there.
async fn part(volume: &Path, path: &Path) -> Result<Option<String>, Failure> {
    let (volume, path) = (volume.to_owned(), path.to_owned());
    blocking(move || {
        let mounts = std::fs::read("/proc/self/mountinfo").map_err(|error| {
            Failure::node(Code::Internal, format!("the mounts of the node: {error}"))
        })?;
        // The table has paths without links, but the kubelet's directory may be a link.
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let below = subpath::resolve(&mounts, &real(&volume), &real(&path));
        Ok(below.and_then(|below| below.to_str().map(str::to_owned)))
    })
    .await
}

/// Reads the medium, mode and owner of an emptyDir on the node.
fn medium(path: &Path) -> Result<Medium, Failure> {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let failed = |errno: rustix::io::Errno| {
        Failure::node(Code::FailedPrecondition, format!("{}: {errno}", path.display()))
    };
    let open = |path: &Path| {
        openat(
            CWD,
            path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
    };
    let directory = open(path).map_err(failed)?;
    let stat = fstat(&directory).map_err(failed)?;
    let system = fstatfs(&directory).map_err(failed)?;
    let attributes = Attributes { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid };
    // Only a mount point counts: the kubelet's directory may itself be on a tmpfs.
    let above = path
        .parent()
        .map(open)
        .transpose()
        .map_err(failed)?
        .map(fstat)
        .transpose()
        .map_err(failed)?;
    let is_mount = above.is_some_and(|above| above.st_dev != stat.st_dev);
    // The types of these fields differ between architectures.
    let (kind, size) =
        (system.f_type as i64, (system.f_blocks as u64).saturating_mul(system.f_bsize as u64));
    match kind {
        HUGETLBFS_MAGIC => Err(Failure::request(
            Code::FailedPrecondition,
            format!(
                "{}: an emptyDir of huge pages is not available in a cell; allowed are \
                 disk and memory",
                path.display()
            ),
        )),
        TMPFS_MAGIC if is_mount => Ok(Medium { attributes, memory: Some(size) }),
        _ => Ok(Medium { attributes, memory: None }),
    }
}

fn read_failure(path: &Path, error: &ReadError) -> Failure {
    let cause =
        std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Failure::node(Code::FailedPrecondition, format!("volume {}: {error}{cause}", path.display()))
}

fn cell_failure(path: &Path, failure: Failure) -> Failure {
    let message = format!(
        "volume {} could not be brought into the cell: {}",
        path.display(),
        failure.message()
    );
    failure.with_message(message)
}

/// Runs blocking file system calls.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Failure::node(Code::Internal, error.to_string())))
}
