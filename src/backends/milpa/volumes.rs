//! Volumes of pods in cells: copied from the kubelet's pod directory and kept in sync.

use std::{
    collections::HashMap,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use kiyot_config::HostPath;
use kiyot_engine::id::{CellId, ContainerId};
use kiyot_proto::{
    cell::{FileChange, Root, file_change::Change},
    cri,
    store::ReplacedFile,
};
use tokio_util::task::AbortOnDropHandle;

use self::{
    files::{CellFiles, LinkFiles},
    plan::CellPath,
    pod::PodVolumes,
    prepare::Preparation,
    sources::Source,
    watch::SharedWatcher,
};
use super::{
    cells::Cell,
    failure::{Code, Failure},
};
use crate::metrics::ByteCounter;

mod files;
#[cfg(debug_assertions)]
#[path = "../../../fuzz/inside/volumes.rs"]
pub mod fuzzing;
mod plan;
mod pod;
mod prepare;
mod reader;
mod replaced;
mod sources;
mod subpath;
pub mod support;
#[cfg(test)]
mod tests;
mod tree;
mod volume_sync;
mod watch;

/// Most bytes of the end of a termination message that are copied to the node. The kubelet reads
/// the last 4096.
const MAX_TERMINATION_MESSAGE_BYTES: u32 = 64 << 10;

/// Volumes of all pods in cells. Dropping this ends their synchronisation.
#[derive(Debug)]
pub struct Volumes {
    kubelet_dirs: Vec<PathBuf>,
    host_path: RwLock<HostPath>,
    watcher: Arc<SharedWatcher>,
    pods: Mutex<HashMap<CellId, PodEntry>>,
    /// Bytes of files that were sent to cells.
    bytes: ByteCounter,
}

/// Volumes of a pod and the task that keeps them in sync.
#[derive(Debug)]
struct PodEntry {
    pod: Arc<PodVolumes>,
    keeper: Option<AbortOnDropHandle<()>>,
}

impl Volumes {
    /// Creates the volumes for pods of the kubelets with these directories (`--root-dir`, by
    /// default `/var/lib/kubelet`).
    pub fn new(kubelet_dirs: Vec<PathBuf>, host_path: HostPath) -> Arc<Self> {
        Arc::new(Self {
            kubelet_dirs,
            host_path: RwLock::new(host_path),
            watcher: Arc::default(),
            pods: Mutex::default(),
            bytes: ByteCounter::default(),
        })
    }

    /// Returns the counter of the bytes of files that are sent to cells.
    pub fn bytes(&self) -> ByteCounter {
        self.bytes.clone()
    }

    fn files(&self, cell: &Cell) -> LinkFiles {
        LinkFiles(cell.link.clone(), self.bytes.clone())
    }

    /// Sets the policy for node paths that containers mount from now on. Existing copies stay.
    pub fn set_host_path(&self, host_path: HostPath) {
        *self.host_path.write().unwrap_or_else(PoisonError::into_inner) = host_path;
    }

    /// Copies everything that a container mounts into the cell, and returns the mounts for the
    /// cell's containerd: same order, host paths in the cell. An image volume has no path and is
    /// unchanged. The `replaced` files have their own content in the cell, from now on.
    ///
    /// Fails with FAILED_PRECONDITION and the path if the path is not available in a cell or not
    /// written yet, else with the cell's own failure.
    pub async fn prepare(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
        replaced: &[ReplacedFile],
    ) -> Result<Vec<cri::Mount>, Failure> {
        let files = Arc::new(self.files(cell));
        Box::pin(self.prepare_in(&cell.id, files, sandbox, container, replaced)).await
    }

    async fn prepare_in(
        &self,
        cell: &CellId,
        files: Arc<dyn CellFiles>,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
        replaced: &[ReplacedFile],
    ) -> Result<Vec<cri::Mount>, Failure> {
        let pod = self.pod(cell, files, replaced);
        let preparation = Preparation {
            kubelet_dirs: &self.kubelet_dirs,
            host_path: *self.host_path.read().unwrap_or_else(PoisonError::into_inner),
            uid: uid(sandbox),
            container: container.metadata.as_ref().map_or("", |metadata| &metadata.name),
            pod: &pod,
        };
        let mut mounts = container.mounts.clone();
        for mount in mounts.iter_mut().filter(|mount| mount.image.is_none()) {
            mount.host_path = preparation.mount(mount).await?;
        }
        // The keeper then watches the new volumes.
        pod.changed.notify_one();
        Ok(mounts)
    }

    /// Copies the termination message of an exited container to the node (bounded). A failure is
    /// logged, and the kubelet falls back to the log.
    ///
    /// Runs before the exit is reported, because the kubelet then reads the message at the mount's
    /// path on the node. `container` is as the kubelet sent it.
    pub async fn fetch_termination_message(
        &self,
        cell: &Cell,
        id: &ContainerId,
        container: &cri::ContainerConfig,
    ) {
        self.copy_termination_message(&self.files(cell), id, container).await;
    }

    /// Removes files of a container that its next attempt doesn't use. Succeeds if files are
    /// absent.
    ///
    /// Fails with the cell's own failure.
    pub async fn forget_container(
        &self,
        cell: &Cell,
        container: &cri::ContainerConfig,
        cell_log: &str,
    ) -> Result<(), Failure> {
        let changes = self.removals(container, cell_log);
        if changes.is_empty() { Ok(()) } else { self.files(cell).change(changes).await }
    }

    fn removals(&self, container: &cri::ContainerConfig, cell_log: &str) -> Vec<FileChange> {
        let uid = container.labels.get("io.kubernetes.pod.uid").map_or("", String::as_str);
        let messages = container.mounts.iter().filter_map(|mount| {
            match Source::of(&self.kubelet_dirs, uid, &mount.host_path) {
                Source::TerminationLog { container, file } => {
                    Some(format!("containers/{container}/{file}"))
                }
                _ => None,
            }
        });
        // Each container's log has its own directory.
        let log = cell_log.rsplit_once('/').map(|(directory, _)| directory.to_owned());
        log.into_iter()
            .chain(messages)
            .map(|path| CellPath::new(Root::Pod, path).change(Change::Remove(true)))
            .collect()
    }

    async fn copy_termination_message(
        &self,
        files: &dyn CellFiles,
        id: &ContainerId,
        container: &cri::ContainerConfig,
    ) {
        let uid = container.labels.get("io.kubernetes.pod.uid").map_or("", String::as_str);
        if uid.is_empty() {
            tracing::debug!(
                container = %id,
                "no termination message: the container has no label with its pod's uid"
            );
        }
        for mount in &container.mounts {
            let Source::TerminationLog { container, file } =
                Source::of(&self.kubelet_dirs, uid, &mount.host_path)
            else {
                continue;
            };
            let place = CellPath::new(Root::Pod, format!("containers/{container}/{file}"));
            let fetched = match files.get(&place, MAX_TERMINATION_MESSAGE_BYTES, true).await {
                Ok(Some(message)) if !message.is_empty() => {
                    let path = PathBuf::from(&mount.host_path);
                    let failed =
                        move |error: io::Error| Failure::node(Code::Internal, error.to_string());
                    prepare::blocking(move || overwrite(&path, &message).map_err(failed)).await
                }
                Ok(_) => Ok(()),
                Err(failure) => Err(failure),
            };
            if let Err(failure) = fetched {
                tracing::warn!(
                    container = %id,
                    path = mount.host_path,
                    error = %failure,
                    "termination message not copied to the node"
                );
            }
        }
    }

    /// Keeps a pod's volumes in sync until [`Self::release`]. Called when the pod's first container
    /// is created and, after a restart, for each of its containers when the cell is connected.
    pub fn keep(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
        replaced: &[ReplacedFile],
    ) {
        self.keep_in(&cell.id, Arc::new(self.files(cell)), sandbox, container, replaced);
    }

    fn keep_in(
        &self,
        cell: &CellId,
        files: Arc<dyn CellFiles>,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
        replaced: &[ReplacedFile],
    ) {
        let pod = self.pod(cell, files, replaced);
        for mount in &container.mounts {
            if let Source::Atomic { plugin, name } =
                Source::of(&self.kubelet_dirs, uid(sandbox), &mount.host_path)
            {
                pod.volume(
                    PathBuf::from(&mount.host_path),
                    sources::volume_path(&plugin, &name, false),
                );
            }
        }
        let watcher = Arc::clone(&self.watcher);
        if let Some(entry) = self.pods().get_mut(cell)
            && entry.keeper.is_none()
        {
            entry.keeper =
                Some(AbortOnDropHandle::new(tokio::spawn(Arc::clone(&pod).keep(watcher))));
        }
        pod.changed.notify_one();
    }

    /// Ends the synchronisation that [`Self::keep`] started for a cell.
    pub fn release(&self, cell: &CellId) {
        let entry = self.pods().remove(cell);
        if let Some(entry) = entry {
            drop(entry.keeper);
            self.watcher.forget(&entry.pod.changed);
        }
    }

    fn pod(
        &self,
        cell: &CellId,
        files: Arc<dyn CellFiles>,
        replaced: &[ReplacedFile],
    ) -> Arc<PodVolumes> {
        let mut pods = self.pods();
        let entry = pods.entry(cell.clone()).or_insert_with(|| PodEntry {
            pod: Arc::new(PodVolumes::new(cell.clone(), Arc::clone(&files))),
            keeper: None,
        });
        entry.pod.use_files(files);
        entry.pod.set_replaced(replaced);
        Arc::clone(&entry.pod)
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<CellId, PodEntry>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn uid(sandbox: &cri::PodSandboxConfig) -> &str {
    sandbox.metadata.as_ref().map_or("", |metadata| &metadata.uid)
}

/// Overwrites an existing regular file, following no link.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    file.set_len(0)?;
    file.write_all(content)
}
