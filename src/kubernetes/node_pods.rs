//! Requests of the node's pods outside cells. Cells on the node leave this amount free.

use std::{sync::Arc, time::Duration};

use kiyot_engine::placement::NodeShare;
use kiyot_kubernetes::Counted;
use tokio::time::timeout;

use crate::backends::milpa::Milpa;

/// Period after which the pods are counted again without a change. When a pod moves from its cell
/// to the node, its record is removed only after the pod has changed.
const RECOUNT_PERIOD: Duration = Duration::from_secs(60);

/// Counts the pods after each change until the informer ends. Changes during a count are counted
/// together.
pub(super) async fn count(milpa: Arc<Milpa>, mut counted: Counted) {
    let mut last = None;
    loop {
        let in_cells = milpa.inventory().pod_uids();
        let sum = counted.outside_cells(|uid| in_cells.contains(uid));
        let requests = sum.map(|sum| NodeShare {
            milli_cpus: sum.amount("cpu"),
            memory_mib: sum.amount("memory").div_ceil(1 << 20),
        });
        if let Some(requests) =
            requests.filter(|requests| last.replace(*requests) != Some(*requests))
        {
            milpa.cells().set_node_pods(requests);
        }
        if timeout(RECOUNT_PERIOD, counted.changed()).await == Ok(false) {
            return;
        }
    }
}
