//! `simulate`: runs the engine of cells in a simulated world.

use std::{
    fmt::Write as _,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::{Args, ValueEnum, value_parser};
use kiyot_config::{BackendConfig, Config, MilpaBackend};
use kiyot_engine::placement::Size;
use kiyot_sim::{
    Faults, NodeOptions, SimulationOptions, SimulationReport, Workload, WorkloadPod, simulate,
};

use super::{Output, UsageError, bounded, catalogues};
use crate::workload::{MAX_FILE_BYTES, read_workload};

mod chart;
mod comparison;

/// The most pods of a simulation.
const MAX_PODS: u32 = 1_000_000;
/// The longest simulated time, in hours: a month.
const MAX_HOURS: u32 = 31 * 24;
/// The most configurations that are compared.
const MAX_CONFIGS: usize = 3;

/// The most CPUs and GiB of a node.
const MAX_NODE: i64 = 65_536;

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub(super) struct SimulateArguments {
    /// Seed of all random decisions.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Random pods that are created.
    #[arg(
        long,
        default_value_t = 10_000,
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_PODS))
    )]
    pods: u32,
    /// Hours in which pods are created. Five hours without faults follow.
    #[arg(
        long,
        default_value_t = 24,
        value_parser = value_parser!(u32).range(1..=i64::from(MAX_HOURS))
    )]
    hours: u32,
    /// Faults of the world; by default "usual", with --trace "none".
    #[arg(long, value_enum)]
    faults: Option<FaultsArgument>,
    /// File for the events, a line each.
    #[arg(long, conflicts_with = "trace")]
    events: Option<PathBuf>,
    /// Path of the configuration whose warm pools, limits and placement are simulated. A second and
    /// a third configuration are shown beside the first.
    #[arg(long, requires = "trace")]
    config: Vec<PathBuf>,
    /// Pods instead of random pods: comma-separated values with the columns arrival_s, duration_s,
    /// cpu, memory, launch_type and namespace (docs/milpactl.md).
    #[arg(long, requires = "config", conflicts_with_all = ["pods", "hours"])]
    trace: Option<PathBuf>,
    /// Prices of instances: "ec2-us-east-1" is built in, anything else is a file
    /// (docs/annotations.md).
    #[arg(long, default_value = catalogues::BUILT_IN, requires = "trace")]
    catalogue: PathBuf,
    /// Median time in seconds from the launch of an instance until its agent connects.
    #[arg(
        long,
        default_value_t = 35,
        requires = "trace",
        value_parser = value_parser!(u32).range(1..=3600)
    )]
    boot_seconds: u32,
    /// CPUs of the node for cells on it, if the key `providers` allows them. By default all cells
    /// are instances of the catalogue.
    #[arg(
        long,
        requires = "trace",
        requires = "node_gib",
        value_parser = value_parser!(u32).range(1..=MAX_NODE)
    )]
    node_cpus: Option<u32>,
    /// Memory of the node in GiB.
    #[arg(long, requires = "node_cpus", value_parser = value_parser!(u32).range(1..=MAX_NODE))]
    node_gib: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FaultsArgument {
    /// No faults.
    None,
    /// Faults as on a bad day.
    Usual,
    /// Every fault, much more often than in reality.
    Dense,
}

impl FaultsArgument {
    fn faults(self) -> Faults {
        match self {
            Self::None => Faults::NONE,
            Self::Usual => Faults::USUAL,
            Self::Dense => Faults::DENSE,
        }
    }
}

/// Runs a simulation.
pub(super) fn run(arguments: &SimulateArguments) -> Result<Output, UsageError> {
    match &arguments.trace {
        Some(trace) => run_trace(arguments, trace),
        None => run_random(arguments),
    }
}

fn run_random(arguments: &SimulateArguments) -> Result<Output, UsageError> {
    let options = SimulationOptions {
        seed: arguments.seed,
        workload: Workload::Random {
            pods: arguments.pods,
            duration: Duration::from_secs(u64::from(arguments.hours) * 3600),
        },
        faults: arguments.faults.unwrap_or(FaultsArgument::Usual).faults(),
    };
    let Some(path) = &arguments.events else {
        return Ok(output(&simulate(&options, None)));
    };
    let failed = |error| UsageError(format!("{}: can't be written: {error}", path.display()));
    let mut events = BufWriter::new(File::create(path).map_err(failed)?);
    let report = simulate(&options, Some(&mut events));
    events.flush().map_err(failed)?;
    Ok(output(&report))
}

/// Simulates the pods of a trace by each configuration.
fn run_trace(arguments: &SimulateArguments, trace: &Path) -> Result<Output, UsageError> {
    if arguments.config.len() > MAX_CONFIGS {
        let given = arguments.config.len();
        return Err(UsageError(format!(
            "--config is given {given} times; allowed: once, or up to {MAX_CONFIGS} times to \
             compare"
        )));
    }
    let of_trace =
        |error: &dyn std::fmt::Display| UsageError(format!("{}: {error}", trace.display()));
    let text = bounded::read_file(trace, MAX_FILE_BYTES)
        .map_err(|error| of_trace(&format!("can't be read: {error}")))?;
    let pods: Arc<[WorkloadPod]> = read_workload(&text).map_err(|error| of_trace(&error))?.into();
    let file = catalogues::read(&arguments.catalogue)?;
    let catalogue = Arc::new(file.catalogue);
    let boot = Duration::from_secs(arguments.boot_seconds.into());
    let size = arguments.node_cpus.zip(arguments.node_gib);
    let size = size.map(|(cpus, gib)| Size { cpus, memory_mib: u64::from(gib) * 1024 });
    let mut reports = Vec::new();
    for path in &arguments.config {
        let config = super::load(path)?;
        let milpa = milpa(&config).ok_or_else(|| {
            UsageError(format!("{}: has no backend with type = \"milpa\"", path.display()))
        })?;
        let node = Arc::new(NodeOptions::of(milpa, Arc::clone(&catalogue), boot, size));
        let options = SimulationOptions {
            seed: arguments.seed,
            workload: Workload::Known { pods: Arc::clone(&pods), node },
            faults: arguments.faults.unwrap_or(FaultsArgument::None).faults(),
        };
        reports.push((path.display().to_string(), simulate(&options, None)));
    }
    let mut text = comparison::table(pods.len(), &reports);
    for (name, report) in &reports {
        let _ = write!(text, "\n{}", chart::chart(name, &report.usage, most(&reports)));
    }
    text += &catalogues::notes(&arguments.catalogue, &file.set_aside);
    let is_sound = reports.iter().all(|(_, report)| report.violations.is_empty());
    Ok(Output { text, code: code(is_sound) })
}

fn milpa(config: &Config) -> Option<&MilpaBackend> {
    config.backends.values().find_map(|backend| match backend {
        BackendConfig::Milpa(milpa) => Some(&**milpa),
        BackendConfig::Cri(_) => None,
    })
}

/// Returns the most instances of all reports in a part of the time, in thousandths: the scale of
/// all charts.
fn most(reports: &[(String, SimulationReport)]) -> u64 {
    let shares = reports.iter().flat_map(|(_, report)| &report.usage.shares);
    shares.map(|share| share.with_pod + share.without_pod).max().unwrap_or_default()
}

fn output(report: &SimulationReport) -> Output {
    let mut text = String::new();
    let SimulationReport { pods_run, instances, most_instances, crashes, events, usage, .. } =
        report;
    // A String never fails.
    let _ = writeln!(
        text,
        "pods run: {pods_run}, {} of them first in a warm cell\n\
         instances: {instances}, {most_instances} at most at a time\n\
         kills of the daemon: {crashes}\nevents: {events}, sha256 {}\nviolations: {}",
        usage.warm_starts,
        report.trace_sha256,
        report.violations.len()
    );
    for (fault, times) in &report.faults {
        let _ = writeln!(text, "fault {fault}: {times}");
    }
    for violation in &report.violations {
        let _ = writeln!(text, "  {violation}");
    }
    Output { text, code: code(report.violations.is_empty()) }
}

fn code(is_sound: bool) -> ExitCode {
    if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
