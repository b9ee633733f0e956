//! The simulator: the daemon's engine of cells in a simulated world.
//!
//! Discrete events drive it: pods come and go, the cloud loses replies and capacity, the daemon is
//! killed between two effects. No code reads a clock or the network, so that a seed always makes
//! the same trace. Invariants are checked at each event and at the end: after the faults have
//! stopped, nothing may be left.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

mod agent;
#[cfg(test)]
mod bug;
mod calls;
mod capacity;
pub mod cloud;
mod daemon;
mod disruptions;
mod faults;
mod instance;
mod kubelet;
mod node;
mod pools;
mod rng;
mod trace;
mod usage;
mod workload;
mod world;

#[cfg(test)]
mod tests;

pub use faults::Faults;
pub use node::{NodeOptions, OnNode};
pub use usage::{Percentiles, Share, Usage};
pub use workload::WorkloadPod;

use trace::Trace;
use world::World;

/// The options of a simulation.
#[derive(Debug, Clone)]
pub struct SimulationOptions {
    /// The seed of all random decisions.
    pub seed: u64,
    /// The pods to create.
    pub workload: Workload,
    /// The faults of the world.
    pub faults: Faults,
    /// A bug planted in the engine, to prove that the simulation finds it.
    #[cfg(test)]
    pub bug: Option<bug::Bug>,
}

/// The pods of a simulation, and the node on which they run.
#[derive(Debug, Clone)]
pub enum Workload {
    /// Random pods on a node with random pools and limits.
    Random {
        /// The number of pods.
        pods: u32,
        /// The time in which the pods are created.
        duration: Duration,
    },
    /// Known pods on a configured node.
    Known {
        /// The pods.
        pods: Arc<[WorkloadPod]>,
        /// The node.
        node: Arc<NodeOptions>,
    },
}

impl Workload {
    /// Returns the time in which pods are created and, if known, run.
    fn duration(&self) -> Duration {
        match self {
            Self::Random { duration, .. } => *duration,
            Self::Known { pods, .. } => {
                let ends = pods.iter().map(|pod| pod.arrival + pod.duration);
                ends.max().unwrap_or_default()
            }
        }
    }
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulationReport {
    /// The pods that ran.
    pub pods_run: u64,
    /// The instances that were launched.
    pub instances: u64,
    /// The most instances that ran at the same time.
    pub most_instances: u64,
    /// The kills of the daemon.
    pub crashes: u64,
    /// The number of events.
    pub events: u64,
    /// The number of times that each fault happened, by name.
    pub faults: BTreeMap<&'static str, u64>,
    /// The times, instances and cost of the pods.
    pub usage: Usage,
    /// The violations of invariants; empty for a correct engine.
    pub violations: Vec<String>,
    /// The digest of the trace.
    pub trace_sha256: String,
}

/// Runs a simulation, and writes its trace.
pub fn simulate(
    options: &SimulationOptions,
    trace: Option<&mut dyn io::Write>,
) -> SimulationReport {
    World::new(options, Trace::new(trace)).run()
}
