//! The simulator: the real engine of cells in a simulated world.
//!
//! Discrete events drive it: pods come and go, the cloud loses replies and capacity, the daemon is
//! killed between two effects. Nothing reads a clock or the network, so that a seed always makes
//! the same trace. Invariants are checked as the events happen, and at the end, when the faults
//! have stopped and nothing may be left.

use std::{collections::BTreeMap, io, time::Duration};

mod agent;
mod bug;
mod calls;
mod capacity;
mod daemon;
mod disruptions;
mod faults;
mod instance;
mod kubelet;
mod rng;
mod trace;
mod world;

#[cfg(test)]
mod tests;

pub use bug::Bug;
pub use faults::Faults;

use trace::Trace;
use world::World;

/// The options of a simulation.
#[derive(Debug, Clone)]
pub struct SimulationOptions {
    /// The seed of all random decisions.
    pub seed: u64,
    /// The pods that are created.
    pub pods: u32,
    /// The time in which they are created.
    pub duration: Duration,
    /// The faults of the world.
    pub faults: Faults,
    /// A bug of the engine, to prove that the simulation finds it.
    pub bug: Option<Bug>,
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulationReport {
    /// The pods that ran.
    pub pods_run: u64,
    /// The instances that were launched.
    pub instances: u64,
    /// The most instances that ran at a time.
    pub most_instances: u64,
    /// The kills of the daemon.
    pub crashes: u64,
    /// The events.
    pub events: u64,
    /// The numbers of faults that were played, by their names.
    pub faults: BTreeMap<&'static str, u64>,
    /// The violations of invariants; empty for a sound engine.
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
