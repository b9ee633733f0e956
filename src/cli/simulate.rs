//! `simulate`: runs the engine of cells in a simulated world.

use std::{
    fmt::Write as _,
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Args, ValueEnum, value_parser};

use super::{Output, UsageError};
use crate::backends::milpa::simulator::{Faults, SimulationOptions, SimulationReport, Workload, simulate};

/// The most pods of a simulation.
const MAX_PODS: u32 = 1_000_000;
/// The longest simulated time, in hours: a month.
const MAX_HOURS: u32 = 31 * 24;

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub(super) struct SimulateArguments {
    /// Seed of all random decisions.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Pods that are created.
    #[arg(
        long,
        default_value_t = 10_000,
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_PODS))
    )]
    pods: u32,
    /// Hours in which they are created. Five hours without faults follow.
    #[arg(
        long,
        default_value_t = 24,
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_HOURS))
    )]
    hours: u32,
    /// Faults of the world.
    #[arg(long, value_enum, default_value = "usual")]
    faults: FaultsArgument,
    /// File for the trace, a line per event.
    #[arg(long)]
    trace: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FaultsArgument {
    /// No faults.
    None,
    /// Faults as a bad day has them.
    Usual,
    /// Every fault, much more often than in reality.
    Dense,
}

/// Runs a simulation.
pub(super) fn run(arguments: &SimulateArguments) -> Result<Output, UsageError> {
    let options = SimulationOptions {
        seed: arguments.seed,
        workload: Workload::Random {
            pods: arguments.pods,
            duration: Duration::from_secs(u64::from(arguments.hours) * 3600),
        },
        faults: match arguments.faults {
            FaultsArgument::None => Faults::NONE,
            FaultsArgument::Usual => Faults::USUAL,
            FaultsArgument::Dense => Faults::DENSE,
        },
        bug: None,
    };
    let Some(path) = &arguments.trace else {
        return Ok(output(&simulate(&options, None)));
    };
    let failed = |error| UsageError(format!("{}: can't be written: {error}", path.display()));
    let mut trace = BufWriter::new(File::create(path).map_err(failed)?);
    let report = simulate(&options, Some(&mut trace));
    trace.flush().map_err(failed)?;
    Ok(output(&report))
}

fn output(report: &SimulationReport) -> Output {
    let mut text = String::new();
    let SimulationReport { pods_run, instances, most_instances, crashes, events, .. } = report;
    // A String never fails.
    let _ = writeln!(
        text,
        "pods run: {pods_run}\ninstances: {instances}, {most_instances} at most at a time\n\
         kills of the daemon: {crashes}\nevents: {events}\ntrace: sha256 {}\nviolations: {}",
        report.trace_sha256,
        report.violations.len()
    );
    for (fault, times) in &report.faults {
        let _ = writeln!(text, "fault {fault}: {times}");
    }
    for violation in &report.violations {
        let _ = writeln!(text, "  {violation}");
    }
    let is_sound = report.violations.is_empty();
    Output { text, code: if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE } }
}
