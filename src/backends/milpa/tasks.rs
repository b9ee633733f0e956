//! Background tasks of a backend, which end when the daemon stops.

use std::{future::Future, time::Duration};

use tokio::task::JoinHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Tasks that have an owner and a common end. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    /// Runs work in a task. The handle's output is `None` if the daemon stopped first.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        let stop = self.stop.clone();
        // Boxed: the work moves from one future into the next, and each would have room for a copy.
        let work = Box::pin(work);
        self.tracker.spawn(async move { stop.run_until_cancelled(work).await })
    }

    /// Runs work in a task, and calls `then` with its output, or with `None` if the daemon stopped
    /// first.
    pub(crate) fn spawn_then<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        then: impl FnOnce(Option<T>) + Send + 'static,
    ) {
        let stop = self.stop.clone();
        let work = Box::pin(work);
        self.tracker.spawn(async move { then(stop.run_until_cancelled(work).await) });
    }

    /// Stops all tasks. Returns the number of tasks that did not end in time as an error.
    pub(crate) async fn shutdown(&self, timeout: Duration) -> Result<(), usize> {
        self.stop.cancel();
        self.tracker.close();
        let ended = tokio::time::timeout(timeout, self.tracker.wait()).await;
        ended.map_err(|_| self.tracker.len())
    }
}
