//! What the runtime of cells does that not each does. A kubelet asks before a pod has a cell
//! (`Status`), so the word of the last cell stands for the next: all cells of a provider have the
//! same runtime, until somebody replaces it. What the pod's own cell does not do is refused by name
//! all the same.

use std::sync::atomic::{AtomicBool, Ordering};

use kiyot_proto::{cri, store as records};

use super::{SAMPLE, Verbs, calls, failure};
use crate::backends::{
    Features,
    milpa::{
        cells::Cell,
        store::{Batch, StoreError, Table},
    },
};

/// Where it is kept in [`Table::Runtime`].
const KEY: &str = "cells";

/// What the last cell said; nothing until the first.
#[derive(Debug, Default)]
pub(super) struct Told {
    recursive_read_only_mounts: AtomicBool,
    /// Held by whoever changes it, on disk first.
    keeping: tokio::sync::Mutex<()>,
}

impl Verbs {
    /// What pods in cells may ask for, as far as is known.
    pub fn features(&self) -> Features {
        Features {
            recursive_read_only_mounts: self
                .told
                .recursive_read_only_mounts
                .load(Ordering::Relaxed),
            may_be_on_node: self.rules().keeps_any(),
        }
    }

    /// Takes what cells said to the daemon before this one.
    pub(super) async fn restore_features(&self) -> Result<(), StoreError> {
        let kept: Vec<(String, records::CellRuntime)> =
            self.parts.store.load(Table::Runtime).await?;
        if let Some((_, kept)) = kept.into_iter().find(|(key, _)| key == KEY) {
            self.told
                .recursive_read_only_mounts
                .store(kept.recursive_read_only_mounts, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Asks a cell that has just been made. One that does not say changes nothing.
    pub(super) async fn learn_features(&self, cell: &Cell) {
        let mut runtime = calls::runtime(cell);
        let status = calls::answered(
            SAMPLE,
            "Status",
            runtime.status(calls::within(SAMPLE, cri::StatusRequest::default())),
        )
        .await;
        let recursive_read_only_mounts = match status {
            Ok(status) => recursive_read_only_mounts(&status),
            Err(status) => {
                tracing::debug!(cell = %cell.id, status = status.message(), "A cell did not say what its runtime does");
                return;
            }
        };
        let _keeping = self.told.keeping.lock().await;
        if self.told.recursive_read_only_mounts.load(Ordering::Relaxed)
            == recursive_read_only_mounts
        {
            return;
        }
        let mut batch = Batch::default();
        batch.put(Table::Runtime, KEY, &records::CellRuntime { recursive_read_only_mounts });
        match self.parts.store.commit(batch).await {
            Ok(()) => {
                tracing::info!(cell = %cell.id, recursive_read_only_mounts, "The runtime of cells does other than before");
                self.told
                    .recursive_read_only_mounts
                    .store(recursive_read_only_mounts, Ordering::Relaxed);
            }
            // The next cell says it again.
            Err(error) => {
                tracing::warn!(cell = %cell.id, error = failure::chain(&error), "What the runtime of cells does could not be recorded")
            }
        }
    }
}

/// Of the default handler, by which each container of a cell runs. containerd before 2.0 lists
/// none.
fn recursive_read_only_mounts(status: &cri::StatusResponse) -> bool {
    let default = status.runtime_handlers.iter().find(|handler| handler.name.is_empty());
    default
        .and_then(|handler| handler.features)
        .is_some_and(|features| features.recursive_read_only_mounts)
}
