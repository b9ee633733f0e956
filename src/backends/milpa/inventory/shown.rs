//! Cells as the Kubernetes API shows them.

use std::collections::{BTreeMap, HashMap};

use super::Inventory;
use crate::{
    annotations::CellRequest,
    backends::milpa::{cells::CellView, id::CellId},
};

/// The parts of a cell's object that the admin API's message of a cell doesn't have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OfPod {
    /// The labels of its pod.
    pub labels: BTreeMap<String, String>,
    /// True if the pod names its instance type.
    pub is_named_type: bool,
}

/// The launches that failed before a cell's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EarlierLaunches {
    /// Their number.
    pub failures: u32,
    /// True if one of them was for spot.
    pub spot_failed: bool,
}

impl Inventory {
    /// Returns what a cell shows of its pod; `None` before the pod is bound. It does not change.
    pub fn of_pod(&self, cell: &CellId) -> Option<OfPod> {
        let config = self.pods.sandbox_of_cell(cell)?.meta().config.unwrap_or_default();
        let request = CellRequest::parse(&config.annotations).unwrap_or_default();
        Some(OfPod {
            labels: config.labels.into_iter().collect(),
            is_named_type: request.instance_type.is_some(),
        })
    }

    /// Returns true for the uid of a pod that the daemon runs without a kubelet.
    pub fn is_standalone(&self, uid: &str) -> bool {
        self.standalone.has(uid)
    }

    /// Returns the failed launches before those of cells, by the cells' ids.
    pub fn earlier_launches(&self, ids: &[CellId]) -> HashMap<String, EarlierLaunches> {
        let earlier = |view: CellView| {
            let earlier =
                EarlierLaunches { failures: view.earlier_failures, spot_failed: view.spot_failed };
            (view.id.to_string(), earlier)
        };
        self.cells.views(ids).into_iter().map(|(view, _)| earlier(view)).collect()
    }
}
