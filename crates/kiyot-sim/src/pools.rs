//! The warm pools of the simulated world: reading, changing and draining them, and checks of their
//! cells.

use std::time::Duration;

use kiyot_engine::{
    engine::Pool,
    id::{CellId, SandboxId},
    placement::{Market, Offering},
};

use crate::{
    Workload,
    node::MAX_COUNT,
    world::{Happening, World},
};

/// The pools of a random node change once in this many hours.
const CHANGE: u32 = 2;
/// The time in which the daemon reads its pools' offerings, in milliseconds.
const READ: (u64, u64) = (100, 5000);

impl World<'_> {
    /// Plans the changes of the pools. They are drained at the end.
    pub(super) fn plan_pools(&mut self) {
        if let Workload::Random { .. } = self.options.workload {
            for hour in 0..self.duration.as_secs() / 3600 {
                if self.rng.once_in(CHANGE) {
                    let at = Duration::from_secs(hour * 3600) + self.rng.seconds(0, 3600);
                    self.after(at, Happening::PoolsChange);
                }
            }
        }
        self.after(self.duration, Happening::PoolsChange);
    }

    /// Passes the pools to a starting daemon. Their offerings follow.
    pub(super) fn start_pools(&mut self) {
        let run = self.run;
        self.set_pools(false);
        let wait = self.rng.millis(READ.0, READ.1);
        self.after(wait, Happening::PoolsRead { run });
    }

    pub(super) fn pools_read(&mut self) {
        self.set_pools(true);
    }

    pub(super) fn pools_change(&mut self) {
        if self.is_calm() {
            self.log(format_args!("the pools are drained"));
            self.node.pools.clear();
        } else {
            for number in 0..self.node.pools.len() {
                let count = self.rng.below(MAX_COUNT + 1);
                self.log(format_args!("pool-{number} has {count} cells"));
                self.node.pools[number].count = count;
            }
        }
        self.set_pools(true);
    }

    fn set_pools(&mut self, are_offerings_known: bool) {
        let time = self.time();
        let Some(daemon) = &mut self.daemon else { return };
        let mut pools: Vec<Pool> = self.node.pools.clone();
        if !are_offerings_known {
            pools.iter_mut().for_each(|pool| pool.candidates = None);
        }
        let effects = daemon.engine.set_pools(pools, time);
        self.dispatch(effects);
    }

    /// Checks that a pool's cell suits the pod that takes it.
    pub(super) fn check_taken(&mut self, cell: &CellId, sandbox: &SandboxId) {
        self.meter.taken(cell);
        let Some(pod) = self.pod_of_order(sandbox).and_then(|number| self.pods.get(number)) else {
            return;
        };
        let Some(kind) = pod.kind else { return };
        let now = self.now;
        let of_cell = self.cloud.instances().values();
        let mut of_cell = of_cell.filter(|one| one.spec.cell == *cell && one.runs(now));
        let Some(instance) = of_cell.next() else { return };
        if !kind.suits(&instance.offering) {
            let text =
                format!("{cell} is a {}, but {} needs {kind:?}", instance.offering, pod.uid());
            self.violation(text);
        }
    }

    /// Checks that a cell is attached to a single pod, even if the daemon is killed meanwhile.
    pub(super) fn check_attached(&mut self, cell: &CellId, pod_uid: &str) {
        let before = self.attached.insert(cell.clone(), pod_uid.to_owned());
        if let Some(before) = before {
            self.violation(format!("{cell} is attached to {pod_uid} after {before}"));
        }
    }

    /// Checks that a new cell is within the limit of the node.
    pub(super) fn check_limit(&mut self, new: &CellId) {
        let Some(daemon) = &self.daemon else { return };
        let (cells, most) = (daemon.engine.ids().count(), self.node.limits.max_cells);
        if cells > most {
            self.violation(format!("{new} is one of {cells} cells, but {most} are allowed"));
        }
    }
}

/// The kind of a random pod: its size, as an index of instance types, and its markets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PodKind {
    pub(super) size: usize,
    pub(super) markets: &'static [Market],
}

impl PodKind {
    /// Returns whether an offering suits the pod. Uses only the names of instance types, not the
    /// engine's functions.
    pub(super) fn suits(self, offering: &Offering) -> bool {
        let types = ["small", "medium", "large"];
        let size = types.iter().position(|name| *name == offering.instance_type);
        size.is_some_and(|size| size >= self.size) && self.markets.contains(&offering.market)
    }
}
