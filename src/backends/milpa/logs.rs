//! Logs of pods in cells: the node's file is byte for byte a slice of the cell's log.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use self::{
    source::{CellLogs, Source},
    writer::{Ask, News, Writer},
};
use super::{
    cells::Cell,
    id::{CellId, ContainerId},
    latest::Latest,
    mailbox::{Sender, mailbox},
};

mod file;
#[doc(hidden)]
pub mod fuzzing;
mod gap;
mod source;
#[cfg(test)]
mod tests;
mod writer;

/// Requests that wait for one writer.
const ASKS: usize = 16;

/// A container's log: where it is in the cell, and where it goes on the node.
#[derive(Debug, Clone)]
pub struct LogRoute {
    /// The container.
    pub container: ContainerId,
    /// Absolute, on the node.
    pub node_path: PathBuf,
    /// Beneath the cell's `pod_dir`.
    pub cell_path: String,
    /// Position in the cell's log at which the node's file begins. Less than 0: the file had so
    /// many bytes before the container.
    pub base: i64,
}

/// Keeps where log files begin, when that changes by itself: a file was made shorter on the node,
/// or a cell does not keep a part of a log.
#[async_trait]
pub trait Keeper: Send + Sync + 'static {
    /// Puts a container's base on disk. A failure is the keeper's to tell.
    async fn keep_base(&self, container: &ContainerId, base: i64);
}

/// Logs of pods in cells. All writers end with it.
#[derive(Default)]
pub struct Logs {
    routes: Mutex<Routes>,
    bases: Bases,
}

/// To whom all writers tell new bases, once somebody wants to know them.
#[derive(Default, Clone)]
struct Bases(Arc<OnceLock<Weak<dyn Keeper>>>);

impl Bases {
    async fn keep(&self, container: &ContainerId, base: i64) {
        if let Some(keeper) = self.0.get().and_then(Weak::upgrade) {
            keeper.keep_base(container, base).await;
        }
    }
}

/// The writers, and whose news are whose.
#[derive(Default)]
struct Routes {
    followed: HashMap<ContainerId, Followed>,
    by_path: HashMap<(CellId, String), ContainerId>,
}

impl Routes {
    fn follow_on(&self, cell: &CellId, source: &Arc<dyn Source>, route: &LogRoute) -> bool {
        let Some(followed) = self
            .followed
            .get(&route.container)
            .filter(|followed| followed.cell == *cell && followed.cell_path == route.cell_path)
        else {
            return false;
        };
        followed.news.change(|news| {
            news.source = Arc::clone(source);
            news.again += 1;
            true
        });
        true
    }
}

/// One writer's handle.
struct Followed {
    cell: CellId,
    cell_path: String,
    news: Arc<Latest<News>>,
    asks: Sender<Ask>,
    _writer: AbortOnDropHandle<()>,
}

impl Logs {
    /// With no log yet.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Whom new bases are told, from now on. The first one stays.
    pub fn kept_by(&self, keeper: Weak<dyn Keeper>) {
        let _ = self.bases.0.set(keeper);
    }

    /// Makes the node's file (before StartContainer answers) and follows the cell's log from base +
    /// the file's length on. Again for the same container, it goes on with this cell's link.
    ///
    /// INTERNAL, naming the path, if the file can't be made: its last component must not be a link,
    /// and its parent must exist.
    pub async fn follow(self: &Arc<Self>, cell: &Cell, route: LogRoute) -> Result<(), Status> {
        self.follow_from(&cell.id, Arc::new(CellLogs(cell.link.clone())), route).await
    }

    /// Goes on with the log of a container that has ended, if its file is there: one that is not
    /// was removed by the kubelet. Whether it is followed only from now on.
    ///
    /// INTERNAL as of [`Self::follow`].
    pub async fn resume(self: &Arc<Self>, cell: &Cell, route: LogRoute) -> Result<bool, Status> {
        self.resume_from(&cell.id, Arc::new(CellLogs(cell.link.clone())), route).await
    }

    /// The base of a new container's log: what is in the node's file by now is not of this
    /// container. As with containerd, it stays, and the log comes after it.
    pub async fn base_for(node_path: PathBuf) -> i64 {
        -i64::try_from(file::length_of(node_path).await).unwrap_or(i64::MAX)
    }

    async fn follow_from(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
    ) -> Result<(), Status> {
        if self.follows_on(cell, &source, &route) {
            return Ok(());
        }
        let file = file::NodeFile::open(route.node_path.clone())
            .await
            .map_err(|error| unusable(&route, &error))?;
        self.write(cell, source, route, file);
        Ok(())
    }

    async fn resume_from(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
    ) -> Result<bool, Status> {
        if self.follows_on(cell, &source, &route) {
            return Ok(false);
        }
        let file = file::NodeFile::existing(route.node_path.clone())
            .await
            .map_err(|error| unusable(&route, &error))?;
        Ok(file.is_some_and(|file| self.write(cell, source, route, file)))
    }

    /// Begins a writer; `false` if there is one.
    fn write(
        &self,
        cell: &CellId,
        source: Arc<dyn Source>,
        route: LogRoute,
        file: file::NodeFile,
    ) -> bool {
        // Another call may have been faster; its writer is then as good as this one would be. Under
        // one lock: of two writers the first would be cut, in the middle of what it writes.
        let mut routes = self.routes();
        if routes.follow_on(cell, &source, &route) {
            return false;
        }
        let news = Arc::new(Latest::new(News { source, size: 0, again: 1 }));
        let (asks, asked) = mailbox(ASKS);
        let writer = Box::new(Writer::new(
            route.clone(),
            file,
            self.bases.clone(),
            Arc::clone(&news),
            asked,
        ));
        routes.by_path.insert((cell.clone(), route.cell_path.clone()), route.container.clone());
        let writer = AbortOnDropHandle::new(tokio::spawn(writer.run()));
        routes.followed.insert(
            route.container,
            Followed {
                cell: cell.clone(),
                cell_path: route.cell_path,
                news,
                asks,
                _writer: writer,
            },
        );
        true
    }

    /// Gives a writer that there is already this link.
    fn follows_on(&self, cell: &CellId, source: &Arc<dyn Source>, route: &LogRoute) -> bool {
        self.routes().follow_on(cell, source, route)
    }

    /// The cell says that a log has grown to `size` bytes. Of a log that isn't followed, it is
    /// ignored.
    pub fn grown(&self, cell: &CellId, cell_path: &str, size: u64) {
        let routes = self.routes();
        let followed = routes
            .by_path
            .get(&(cell.clone(), cell_path.to_owned()))
            .and_then(|container| routes.followed.get(container));
        if let Some(followed) = followed {
            followed.news.change(|news| {
                let grown = size > news.size;
                news.size = news.size.max(size);
                grown
            });
        }
    }

    /// Waits until the node's file has all that the container wrote, `within` at most. Called
    /// before an exit is reported. `false` if it has not, or if the log isn't followed.
    pub async fn drain(&self, container: &ContainerId, within: Duration) -> bool {
        tokio::time::timeout(within, self.whole(container)).await.unwrap_or_else(|_| {
            tracing::warn!(%container, seconds = within.as_secs(), "the log of a container is not whole on the node in time");
            false
        })
    }

    /// Waits until the node's file has all that the container wrote; `false` if the log isn't
    /// followed, or not any more.
    pub async fn whole(&self, container: &ContainerId) -> bool {
        let Some(asks) = self.asks(container) else { return false };
        let (done, drained) = oneshot::channel();
        asks.send(Ask::Drain(done)).await.is_ok() && drained.await.is_ok()
    }

    /// `ReopenContainerLog`: flushes, makes the file anew, and returns the position at which it
    /// begins, which the caller keeps before it answers.
    ///
    /// NOT_FOUND if the container's log isn't followed, INTERNAL if the new file can't be made: the
    /// old one then goes on.
    pub async fn reopen(&self, container: &ContainerId) -> Result<i64, Status> {
        let asks = self.asks(container).ok_or_else(|| {
            Status::not_found(format!("the log of container {container} is not followed"))
        })?;
        let (done, reopened) = oneshot::channel();
        let ended =
            || Status::aborted(format!("the log of container {container} is followed no more"));
        asks.send(Ask::Reopen(done)).await.map_err(|_| ended())?;
        reopened.await.map_err(|_| ended())?
    }

    /// Ends what [`Self::follow`] began.
    pub fn close(&self, container: &ContainerId) {
        let mut routes = self.routes();
        if let Some(followed) = routes.followed.remove(container) {
            let path = (followed.cell.clone(), followed.cell_path.clone());
            if routes.by_path.get(&path) == Some(container) {
                routes.by_path.remove(&path);
            }
        }
    }

    fn asks(&self, container: &ContainerId) -> Option<Sender<Ask>> {
        Some(self.routes().followed.get(container)?.asks.clone())
    }

    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unusable(route: &LogRoute, error: &std::io::Error) -> Status {
    Status::internal(format!(
        "log file {} of container {}: {error}",
        route.node_path.display(),
        route.container
    ))
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs").field("followed", &self.routes().followed.len()).finish()
    }
}
