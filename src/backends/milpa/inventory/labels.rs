//! Labels of a cell's pod for the Kubernetes API.

use std::collections::BTreeMap;

use kiyot_engine::id::CellId;

use super::Inventory;

impl Inventory {
    /// Returns the labels of a cell's pod; `None` before the pod is bound. The labels do not
    /// change.
    pub fn labels(&self, cell: &CellId) -> Option<BTreeMap<String, String>> {
        let config = self.pods.sandbox_of_cell(cell)?.meta().config.unwrap_or_default();
        Some(config.labels.into_iter().collect())
    }
}
