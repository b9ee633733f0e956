//! Logs of pods in cells: the node's file is byte for byte a slice of the cell's log.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_engine::id::{CellId, ContainerId};
use kiyot_link::watch::Watch;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use self::{
    source::{CellLogs, Source},
    writer::{CellLog, Command, Writer},
};
use super::{
    cell_client::CellClient,
    cells::Cell,
    failure::{Code, Failure},
    mailbox::{Sender, mailbox},
};
use crate::metrics::ByteCounter;

mod file;
#[cfg(debug_assertions)]
#[path = "../../../fuzz/inside/logs.rs"]
pub mod fuzzing;
mod gap;
mod source;
#[cfg(test)]
mod tests;
mod writer;

/// Bounds the commands that wait for a writer.
const MAX_QUEUED_COMMANDS: usize = 16;

/// Route of a container's log from the cell to the node.
#[derive(Debug, Clone)]
pub struct LogRoute {
    /// Id of the container.
    pub container: ContainerId,
    /// Absolute path on the node.
    pub node_path: PathBuf,
    /// Path below the cell's `pod_dir`.
    pub cell_path: String,
    /// Position in the cell's log at which the node's file begins. Negative if the file already had
    /// this many bytes.
    pub base: i64,
}

/// Records the base of a log when it changes without a request: a file was truncated on the node,
/// or a cell has discarded a part of a log.
#[async_trait]
pub trait BaseStore: Send + Sync + 'static {
    /// Records a container's base. The implementation logs its failures.
    async fn store_base(&self, container: &ContainerId, base: i64);
}

/// Logs of pods in cells. Dropping this ends all writers.
#[derive(Default)]
pub struct Logs {
    routes: Mutex<Routes>,
    bases: Bases,
    /// Bytes written to files of the node.
    bytes: ByteCounter,
}

/// Recipient of new bases, after it is set.
#[derive(Default, Clone)]
struct Bases(Arc<OnceLock<Weak<dyn BaseStore>>>);

impl Bases {
    async fn keep(&self, container: &ContainerId, base: i64) {
        if let Some(store) = self.0.get().and_then(Weak::upgrade) {
            store.store_base(container, base).await;
        }
    }
}

/// Writers, and the containers by the path of their logs.
#[derive(Default)]
struct Routes {
    writers: HashMap<ContainerId, WriterHandle>,
    by_path: HashMap<(CellId, String), ContainerId>,
}

impl Routes {
    fn update_source(&self, cell: &CellId, source: &Arc<dyn Source>, route: &LogRoute) -> bool {
        let Some(writer) = self
            .writers
            .get(&route.container)
            .filter(|writer| writer.cell == *cell && writer.cell_path == route.cell_path)
        else {
            return false;
        };
        writer.cell_log.modify(|cell_log| {
            cell_log.source = Arc::clone(source);
            cell_log.rereads += 1;
        });
        true
    }
}

struct WriterHandle {
    cell: CellId,
    cell_path: String,
    cell_log: Arc<Watch<CellLog>>,
    commands: Sender<Command>,
    _writer: AbortOnDropHandle<()>,
}

impl Logs {
    /// Creates an instance without logs.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns the counter of bytes written to files of the node.
    pub fn bytes(&self) -> ByteCounter {
        self.bytes.clone()
    }

    /// Sets the recipient of new bases; only the first call counts.
    pub fn set_base_store(&self, store: Weak<dyn BaseStore>) {
        let _ = self.bases.0.set(store);
    }

    /// Creates the node's file (before StartContainer returns) and follows the cell's log from the
    /// position base + the file's length. A repeated call for a container replaces the cell's link.
    ///
    /// INTERNAL with the path if the file can't be created. Its last component must not be a link,
    /// and its parent must exist.
    pub async fn follow(self: &Arc<Self>, cell: &Cell, route: LogRoute) -> Result<(), Failure> {
        self.follow_from(&cell.id, Arc::new(CellLogs(CellClient::new(cell))), route).await
    }

    /// Continues the log of an exited container if its file exists; otherwise the kubelet has
    /// removed it. Returns whether following began with this call.
    ///
    /// INTERNAL like [`Self::follow`].
    pub async fn resume(self: &Arc<Self>, cell: &Cell, route: LogRoute) -> Result<bool, Failure> {
        self.resume_from(&cell.id, Arc::new(CellLogs(CellClient::new(cell))), route).await
    }

    /// Returns the base of a new container's log. As with containerd, existing content of the
    /// node's file stays, and the log is appended.
    pub async fn base_for(node_path: PathBuf) -> i64 {
        -i64::try_from(file::length_of(node_path).await).unwrap_or(i64::MAX)
    }

    async fn follow_from(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
    ) -> Result<(), Failure> {
        if self.is_followed(cell, &source, &route) {
            return Ok(());
        }
        let file = file::NodeFile::open(route.node_path.clone())
            .await
            .map_err(|error| file_failure(&route, &error))?;
        self.write(cell, source, route, file);
        Ok(())
    }

    async fn resume_from(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
    ) -> Result<bool, Failure> {
        if self.is_followed(cell, &source, &route) {
            return Ok(false);
        }
        let file = file::NodeFile::existing(route.node_path.clone())
            .await
            .map_err(|error| file_failure(&route, &error))?;
        Ok(file.is_some_and(|file| self.write(cell, source, route, file)))
    }

    /// Starts a writer. Returns false if the container has a writer already.
    fn write(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
        file: file::NodeFile,
    ) -> bool {
        // Checked under the lock that inserts, because a concurrent call may have inserted a
        // writer: replacing it would abort it within a write.
        let mut routes = self.routes();
        if routes.update_source(cell, &source, &route) {
            return false;
        }
        let cell_log = Arc::new(Watch::new(CellLog { source, size: 0, rereads: 1 }));
        let (commands, receiver) = mailbox(MAX_QUEUED_COMMANDS);
        let writer = Box::new(Writer::new(
            route.clone(),
            file,
            self.bases.clone(),
            Arc::clone(&cell_log),
            receiver,
            self.bytes.clone(),
        ));
        routes.by_path.insert((cell.clone(), route.cell_path.clone()), route.container.clone());
        let writer = AbortOnDropHandle::new(tokio::spawn(writer.run()));
        routes.writers.insert(
            route.container,
            WriterHandle {
                cell: cell.clone(),
                cell_path: route.cell_path,
                cell_log,
                commands,
                _writer: writer,
            },
        );
        true
    }

    /// Replaces the link of an existing writer. Returns whether there is a writer.
    fn is_followed(&self, cell: &CellId, source: &Arc<dyn Source>, route: &LogRoute) -> bool {
        self.routes().update_source(cell, source, route)
    }

    /// Handles a report that a cell's log has grown to `size` bytes. Ignores a log that isn't
    /// followed.
    pub fn on_growth(&self, cell: &CellId, cell_path: &str, size: u64) {
        let routes = self.routes();
        let writer = routes
            .by_path
            .get(&(cell.clone(), cell_path.to_owned()))
            .and_then(|container| routes.writers.get(container));
        if let Some(writer) = writer {
            writer.cell_log.modify_if(|cell_log| {
                let grown = size > cell_log.size;
                cell_log.size = cell_log.size.max(size);
                grown
            });
        }
    }

    /// Waits until the node's file has everything that the container wrote, but no longer than
    /// `within`. Called before an exit is reported. Returns whether the file is complete: false on
    /// a timeout, or if the log isn't followed.
    pub async fn drain(&self, container: &ContainerId, within: Duration) -> bool {
        tokio::time::timeout(within, self.wait_complete(container)).await.unwrap_or_else(|_| {
            tracing::warn!(
                %container,
                timeout_s = within.as_secs(),
                "container log incomplete on the node"
            );
            false
        })
    }

    /// Waits until the node's file has everything that the container wrote. Returns false if the
    /// log isn't followed.
    pub async fn wait_complete(&self, container: &ContainerId) -> bool {
        let Some(commands) = self.commands(container) else { return false };
        let (done, drained) = oneshot::channel();
        commands.send(Command::Drain(done)).await.is_ok() && drained.await.is_ok()
    }

    /// Serves `ReopenContainerLog`: flushes, recreates the file, and returns its base. The caller
    /// records the base before it responds.
    ///
    /// NOT_FOUND if the container's log isn't followed. INTERNAL if the new file can't be created:
    /// the old file then continues.
    pub async fn reopen(&self, container: &ContainerId) -> Result<i64, Failure> {
        let commands = self.commands(container).ok_or_else(|| {
            Failure::node(
                Code::NotFound,
                format!("the log of container {container} is not followed"),
            )
        })?;
        let (done, reopened) = oneshot::channel();
        let ended = || {
            Failure::node(
                Code::Aborted,
                format!("the log of container {container} is no longer followed"),
            )
        };
        commands.send(Command::Reopen(done)).await.map_err(|_| ended())?;
        reopened.await.map_err(|_| ended())?
    }

    /// Stops following a container's log.
    pub fn close(&self, container: &ContainerId) {
        let mut routes = self.routes();
        if let Some(writer) = routes.writers.remove(container) {
            let path = (writer.cell.clone(), writer.cell_path.clone());
            if routes.by_path.get(&path) == Some(container) {
                routes.by_path.remove(&path);
            }
        }
    }

    fn commands(&self, container: &ContainerId) -> Option<Sender<Command>> {
        Some(self.routes().writers.get(container)?.commands.clone())
    }

    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file_failure(route: &LogRoute, error: &std::io::Error) -> Failure {
    Failure::node(
        Code::Internal,
        format!("log file {} of container {}: {error}", route.node_path.display(), route.container),
    )
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs").field("followed", &self.routes().writers.len()).finish()
    }
}
