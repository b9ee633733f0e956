//! Features of the cells' runtime that not every runtime has.
//!
//! A kubelet asks for features (`Status`) before a pod has a cell, and reads the features of the
//! last cell: all cells of a provider have the same runtime until it is replaced. A feature that
//! the pod's own cell lacks is still refused by name.

use std::sync::atomic::{AtomicBool, Ordering};

use kiyot_engine::StoreError;
use kiyot_proto::{cri, store as records};
use kiyot_values::error_chain::error_chain;
use tokio::sync::Mutex;

use crate::backends::milpa::{
    cell_client::{CellClient, OPTIONAL_CALL_TIMEOUT},
    cells::Cell,
    store::{Batch, Store, Table},
};

/// Key of the record in [`Table::Runtime`].
const KEY: &str = "cells";

/// Features of the last cell's runtime; all absent until the first cell.
#[derive(Debug)]
pub(crate) struct RuntimeFeatures {
    recursive_read_only_mounts: AtomicBool,
    /// Held during a change, which is recorded before it applies.
    changing: Mutex<()>,
    store: Store,
}

impl RuntimeFeatures {
    /// Loads the features that a previous daemon recorded.
    pub(super) async fn load(store: Store) -> Result<Self, StoreError> {
        let recorded: Vec<(String, records::CellRuntime)> = store.load(Table::Runtime).await?;
        let runtime = recorded.into_iter().find(|(key, _)| key == KEY).map(|(_, runtime)| runtime);
        let recursive_read_only_mounts =
            runtime.is_some_and(|runtime| runtime.recursive_read_only_mounts).into();
        Ok(Self { recursive_read_only_mounts, changing: Mutex::default(), store })
    }

    /// Returns whether mounts may be read-only with all mounts beneath them.
    pub(crate) fn recursive_read_only_mounts(&self) -> bool {
        self.recursive_read_only_mounts.load(Ordering::Relaxed)
    }

    /// Asks a new cell for its features. Without a response nothing changes.
    pub(crate) async fn learn(&self, cell: &Cell) {
        let request = cri::StatusRequest::default();
        let status = match CellClient::new(cell).status(OPTIONAL_CALL_TIMEOUT, request).await {
            Ok(status) => status,
            Err(failure) => {
                tracing::debug!(
                    cell = %cell.id,
                    status = failure.message(),
                    "runtime features of a cell not learned"
                );
                return;
            }
        };
        let recursive_read_only_mounts = recursive_read_only_mounts(&status);
        let _changing = self.changing.lock().await;
        if self.recursive_read_only_mounts() == recursive_read_only_mounts {
            return;
        }
        let mut batch = Batch::default();
        batch.put(Table::Runtime, KEY, &records::CellRuntime { recursive_read_only_mounts });
        match self.store.commit(batch).await {
            Ok(()) => {
                tracing::info!(
                    cell = %cell.id,
                    recursive_read_only_mounts,
                    "runtime features of cells changed"
                );
                self.recursive_read_only_mounts
                    .store(recursive_read_only_mounts, Ordering::Relaxed);
            }
            // The next cell reports them again.
            Err(error) => tracing::warn!(
                cell = %cell.id,
                error = error_chain(&error),
                "runtime features of cells not recorded"
            ),
        }
    }
}

/// Returns whether the default handler, which runs all containers of a cell, has the feature.
/// containerd before 2.0 lists no handlers.
fn recursive_read_only_mounts(status: &cri::StatusResponse) -> bool {
    let default = status.runtime_handlers.iter().find(|handler| handler.name.is_empty());
    default
        .and_then(|handler| handler.features)
        .is_some_and(|features| features.recursive_read_only_mounts)
}
