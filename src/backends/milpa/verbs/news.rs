//! News of cells: which are to be watched, and what becomes of the pods of those that are gone.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::{Verbs, failure, transition::End};
use crate::backends::milpa::{cells::CellEvent, id::CellId, resolver::Server};

/// How long to wait after something failed that must be done.
const RETRY: Duration = Duration::from_secs(2);

impl Verbs {
    /// Follows the news of all cells. After a lag, and at the start, everything is looked at.
    pub(super) async fn follow_news(self: Arc<Self>, mut events: Receiver<CellEvent>) {
        self.look_at_all();
        loop {
            match events.recv().await {
                Ok(CellEvent::Connected(cell)) => self.watch(&cell),
                Ok(CellEvent::Gone { cell, reason }) => self.cell_gone(cell, Some(reason)),
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(
                        missed,
                        "News of cells were missed; all pods in cells are looked at"
                    );
                    self.look_at_all();
                }
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn look_at_all(self: &Arc<Self>) {
        for sandbox in self.view.all_sandboxes() {
            let cell = self.parts.cells.get(&sandbox.cell);
            if cell.is_some() && sandbox.ready {
                self.watch(&sandbox.cell);
            } else if cell.is_some() {
                // It reads as stopped, so its cell must not go on. Until that ends, it may say how
                // its containers have.
                self.watch(&sandbox.cell);
                let verbs = Arc::clone(self);
                self.owned(async move {
                    while let Err(status) = verbs.stop_sandbox(&sandbox.id).await {
                        tracing::warn!(sandbox = %sandbox.id, cell = %sandbox.cell, status = failure::chain(&status), "The cell of a stopped pod is still there");
                        tokio::time::sleep(RETRY).await;
                    }
                });
            } else {
                self.cell_gone(sandbox.cell, None);
            }
        }
    }

    /// A cell is gone, which is certain: what ran in it has ended.
    fn cell_gone(self: &Arc<Self>, cell: CellId, reason: Option<String>) {
        self.unwatch(&cell);
        let verbs = Arc::clone(self);
        self.owned(async move {
            let Some(sandbox) = verbs.view.sandbox_of_cell(&cell) else { return };
            // Whoever stops it ends the cell, and records that itself.
            let _stopping = sandbox.stopping.lock().await;
            if !verbs.view.sandbox(sandbox.id.as_str()).is_ok_and(|sandbox| sandbox.ready)
                && verbs.view.containers_of(&sandbox.id).iter().all(|one| one.exited())
            {
                return;
            }
            let reason = reason.unwrap_or_else(|| verbs.reason_of(&cell));
            tracing::warn!(sandbox = %sandbox.id, %cell, pod = %sandbox.pod, reason, "A pod has lost its cell");
            let end = End::cell_lost(&reason);
            while let Err(error) = verbs.end_sandbox(&sandbox.id, &end).await {
                tracing::error!(sandbox = %sandbox.id, error = failure::chain(&error), "The end of a cell could not be recorded yet");
                tokio::time::sleep(RETRY).await;
            }
            verbs.let_go(&sandbox);
        });
    }

    /// Watches a cell, if it is not watched already, and asks its pod's name servers, once it is
    /// known which.
    pub(super) fn watch(self: &Arc<Self>, id: &CellId) {
        let Some(cell) = self.parts.cells.get(id) else { return };
        let resolvers = self
            .view
            .sandbox_of_cell(id)
            .map(|sandbox| sandbox.meta().resolvers)
            .unwrap_or_default();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = !watched.contains_key(id);
        let watch = watched.entry(id.clone()).or_default();
        let resolves =
            !resolvers.is_empty() && !std::mem::replace(&mut watch.resolves, !resolvers.is_empty());
        let end = watch.end.clone();
        drop(watched);
        if resolves {
            let (verbs, cell, end) = (Arc::clone(self), cell.clone(), end.clone());
            let servers: Vec<_> =
                resolvers.iter().filter_map(|server| Server::of_node(server)).collect();
            self.owned(async move {
                let _ = end
                    .run_until_cancelled(Box::pin(
                        verbs.resolver.serve(&cell.id, &cell.link, &servers),
                    ))
                    .await;
            });
        }
        if is_new {
            let verbs = Arc::clone(self);
            self.owned(async move {
                let _ = end.run_until_cancelled(Box::pin(verbs.watch_cell(cell))).await;
            });
        }
    }

    /// Ends the watch of a cell.
    pub(super) fn unwatch(&self, id: &CellId) {
        if let Some(watched) =
            self.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(id)
        {
            watched.end.cancel();
        }
    }
}
