//! Volumes of pods in cells: copied from the kubelet's pod directory, and kept in step.

use std::{
    collections::HashMap,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock},
};

use kiyot_proto::{
    cell::{FileChange, Root, file_change::Change},
    cri,
};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use self::{
    files::{CellFiles, Files},
    plan::Place,
    pod::Pod,
    prepare::Preparation,
    sources::Source,
    watch::Watcher,
};
use super::{
    cells::Cell,
    id::{CellId, ContainerId},
};
use crate::config::HostPath;

mod disk;
mod files;
#[doc(hidden)]
pub mod fuzzing;
mod kept;
mod plan;
mod pod;
mod prepare;
mod reader;
mod sources;
mod subpath;
pub mod support;
#[cfg(test)]
mod tests;
mod tree;
mod watch;

/// As much of the end of a termination message is brought to the node. The kubelet reads the last
/// 4096 bytes of it.
const MAX_TERMINATION_MESSAGE: u32 = 64 << 10;

/// Volumes of pods in cells. What keeps them in step ends with it.
#[derive(Debug)]
pub struct Volumes {
    kubelet_dirs: Vec<PathBuf>,
    host_path: RwLock<HostPath>,
    /// Made with the first pod that is kept; `None` if the kernel has none to give.
    watcher: OnceLock<Option<Arc<Watcher>>>,
    pods: Mutex<HashMap<CellId, Held>>,
}

/// A pod's volumes, and what keeps them in step.
#[derive(Debug)]
struct Held {
    pod: Arc<Pod>,
    keeper: Option<AbortOnDropHandle<()>>,
}

impl Volumes {
    /// For the pods of kubelets with these directories (`--root-dir`, `/var/lib/kubelet` unless
    /// told otherwise).
    pub fn new(kubelet_dirs: Vec<PathBuf>, host_path: HostPath) -> Arc<Self> {
        Arc::new(Self {
            kubelet_dirs,
            host_path: RwLock::new(host_path),
            watcher: OnceLock::new(),
            pods: Mutex::default(),
        })
    }

    /// Sets what becomes of paths of the node that containers mount from now on. Copies that were
    /// made stay.
    pub fn set_host_path(&self, host_path: HostPath) {
        *self.host_path.write().unwrap_or_else(PoisonError::into_inner) = host_path;
    }

    /// Brings everything that a container mounts into the cell, and returns its mounts as the
    /// cell's containerd must be told them (same order, host paths in the cell). An image volume
    /// has no path and stays as it is.
    ///
    /// FAILED_PRECONDITION, naming the path, if it is not available in a cell or not written yet;
    /// else the cell's own status.
    pub async fn prepare(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
    ) -> Result<Vec<cri::Mount>, Status> {
        Box::pin(self.prepare_in(
            &cell.id,
            Arc::new(CellFiles(cell.link.clone())),
            sandbox,
            container,
        ))
        .await
    }

    async fn prepare_in(
        &self,
        cell: &CellId,
        files: Arc<dyn Files>,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
    ) -> Result<Vec<cri::Mount>, Status> {
        let pod = self.pod(cell, files);
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
        // What is new is watched from now on.
        pod.news.notify_one();
        Ok(mounts)
    }

    /// Copies the termination message of a container that has exited to the node (bounded). A
    /// failure is logged: the kubelet then falls back to the log.
    ///
    /// The kubelet reads it at the mount's path on the node before the exit is reported, so this
    /// comes first. `container` is as the kubelet sent it.
    pub async fn fetch_termination_message(
        &self,
        cell: &Cell,
        id: &ContainerId,
        container: &cri::ContainerConfig,
    ) {
        self.fetch_from(&CellFiles(cell.link.clone()), id, container).await;
    }

    /// Removes what a container has had in its cell for itself alone. What its next attempt will
    /// use stays.
    ///
    /// The cell's own status; absent is fine.
    pub async fn forget_container(
        &self,
        cell: &Cell,
        container: &cri::ContainerConfig,
        cell_log: &str,
    ) -> Result<(), Status> {
        let changes = self.of_container(container, cell_log);
        if changes.is_empty() { Ok(()) } else { CellFiles(cell.link.clone()).change(changes).await }
    }

    fn of_container(&self, container: &cri::ContainerConfig, cell_log: &str) -> Vec<FileChange> {
        let uid = container.labels.get("io.kubernetes.pod.uid").map_or("", String::as_str);
        let messages = container.mounts.iter().filter_map(|mount| {
            match Source::of(&self.kubelet_dirs, uid, &mount.host_path) {
                Source::TerminationLog { container, file } => {
                    Some(format!("containers/{container}/{file}"))
                }
                _ => None,
            }
        });
        // Each container's log has a directory of its own.
        let log = cell_log.rsplit_once('/').map(|(directory, _)| directory.to_owned());
        log.into_iter()
            .chain(messages)
            .map(|path| Place::new(Root::Pod, path).change(Change::Remove(true)))
            .collect()
    }

    async fn fetch_from(
        &self,
        files: &dyn Files,
        id: &ContainerId,
        container: &cri::ContainerConfig,
    ) {
        let uid = container.labels.get("io.kubernetes.pod.uid").map_or("", String::as_str);
        if uid.is_empty() {
            tracing::debug!(container = %id, "a container has no label with its pod's uid; it can have no termination message");
        }
        for mount in &container.mounts {
            let Source::TerminationLog { container, file } =
                Source::of(&self.kubelet_dirs, uid, &mount.host_path)
            else {
                continue;
            };
            let place = Place::new(Root::Pod, format!("containers/{container}/{file}"));
            let fetched = match files.get(&place, MAX_TERMINATION_MESSAGE, true).await {
                Ok(Some(message)) if !message.is_empty() => {
                    let path = PathBuf::from(&mount.host_path);
                    let failed = move |error: io::Error| Status::internal(error.to_string());
                    prepare::blocking(move || overwrite(&path, &message).map_err(failed)).await
                }
                Ok(_) => Ok(()),
                Err(status) => Err(status),
            };
            if let Err(status) = fetched {
                tracing::warn!(container = %id, path = mount.host_path, error = status.message(), "the termination message of a container could not be brought to the node");
            }
        }
    }

    /// Keeps a pod's volumes in step until [`Self::release`]; called when the pod's first container
    /// is made and, after a restart, when its cell is back, for each of the pod's containers.
    pub fn keep(
        self: &Arc<Self>,
        cell: &Cell,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
    ) {
        self.keep_in(&cell.id, Arc::new(CellFiles(cell.link.clone())), sandbox, container);
    }

    fn keep_in(
        &self,
        cell: &CellId,
        files: Arc<dyn Files>,
        sandbox: &cri::PodSandboxConfig,
        container: &cri::ContainerConfig,
    ) {
        let pod = self.pod(cell, files);
        for mount in &container.mounts {
            if let Source::Atomic { plugin, name } =
                Source::of(&self.kubelet_dirs, uid(sandbox), &mount.host_path)
            {
                pod.volume(
                    PathBuf::from(&mount.host_path),
                    sources::volume_place(&plugin, &name, false),
                );
            }
        }
        let watcher = self.watcher().cloned();
        if let Some(held) = self.pods().get_mut(cell)
            && held.keeper.is_none()
        {
            held.keeper =
                Some(AbortOnDropHandle::new(tokio::spawn(Arc::clone(&pod).keep(watcher))));
        }
        pod.news.notify_one();
    }

    /// Ends what [`Self::keep`] began for a cell.
    pub fn release(&self, cell: &CellId) {
        let held = self.pods().remove(cell);
        if let (Some(held), Some(Some(watcher))) = (held, self.watcher.get()) {
            drop(held.keeper);
            watcher.forget(&held.pod.news);
        }
    }

    fn pod(&self, cell: &CellId, files: Arc<dyn Files>) -> Arc<Pod> {
        let mut pods = self.pods();
        let held = pods.entry(cell.clone()).or_insert_with(|| Held {
            pod: Arc::new(Pod::new(cell.clone(), Arc::clone(&files))),
            keeper: None,
        });
        held.pod.use_files(files);
        Arc::clone(&held.pod)
    }

    fn watcher(&self) -> Option<&Arc<Watcher>> {
        let started = self.watcher.get_or_init(|| match Watcher::start() {
            Ok(watcher) => Some(Arc::new(watcher)),
            Err(error) => {
                tracing::warn!(%error, "volumes can't be watched; they are compared from time to time");
                None
            }
        });
        started.as_ref()
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<CellId, Held>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn uid(sandbox: &cri::PodSandboxConfig) -> &str {
    sandbox.metadata.as_ref().map_or("", |metadata| &metadata.uid)
}

/// Writes a file that is there, if it is a regular one and not behind a link.
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
