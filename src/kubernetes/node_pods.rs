//! The requests of the pods on the node that are not in cells: cells on it leave as much free.

use std::{sync::Arc, time::Duration};

use kiyot_engine::placement::NodeShare;
use kiyot_kubernetes::Counted;
use tokio::time::timeout;

use crate::backends::milpa::Milpa;

/// Period after which the pods are counted anew without a change: the record of a pod that has left
/// its cell for the node goes later than the pod changes.
const RECOUNT_PERIOD: Duration = Duration::from_secs(60);

/// Counts the pods at each change, until the informer ends. Changes meanwhile are counted together.
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
