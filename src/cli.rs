//! Command line of `kiyot`.
//!
//! Exit codes: 0; 64 (`EX_USAGE` of sysexits.h) for wrong arguments, configurations and manifests;
//! 1 for everything else.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use kiyot_config as config;
use kiyot_link::core_dump;
use kiyot_manifest as manifest;
use kiyot_values::error_chain::error_chain;

use crate::{
    app,
    explain::{self, Explanation, Prices},
};

mod bounded;
mod catalogues;
mod live_check;
mod simulate;
mod summary;
mod telemetry;
#[cfg(feature = "otel")]
mod trace_export;

use simulate::SimulateArguments;
use telemetry::LogFormat;

/// Exit code for wrong arguments, configurations and manifests.
const EXIT_USAGE: u8 = 64;

/// Default path of the configuration.
const DEFAULT_CONFIG: &str = "/etc/kiyot/kiyot.toml";

/// A CRI endpoint that gives annotated pods a cell of their own.
#[derive(Debug, Parser)]
#[command(name = "kiyot", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves the kubelet until SIGTERM or SIGINT.
    Serve {
        /// Path of the configuration.
        #[arg(long, default_value = DEFAULT_CONFIG)]
        config: PathBuf,
        /// Format of log lines. KIYOT_LOG filters them, such as "info" or "kiyot=debug".
        #[arg(long, value_enum, default_value_t)]
        log_format: LogFormat,
        /// Ends instances of this node that a daemon with another state directory launched. Without
        /// this flag, they prevent launches of cells.
        #[arg(long)]
        take_over: bool,
    },
    /// Reports all problems of a configuration, or summarises it.
    CheckConfig {
        /// Path of the configuration.
        #[arg(long, default_value = DEFAULT_CONFIG)]
        config: PathBuf,
        /// Also proves ids and permissions over the API of the provider "ec2", by lists and dry
        /// runs within 60 s (exit code 1 if a check fails). Prints the missing part of the policy.
        /// Warns of settings of the local kubelet that harm cells.
        #[arg(long)]
        live: bool,
    },
    /// Explains where the pods of a manifest would go and why, or why they would be refused (exit
    /// code 1). Needs no daemon.
    Explain {
        /// Path of the configuration.
        #[arg(long, default_value = DEFAULT_CONFIG)]
        config: PathBuf,
        /// Kubernetes YAML or JSON with pods or their workloads: a file, a directory with *.yaml,
        /// *.yml and *.json, or "-" for the standard input. Can be repeated.
        #[arg(short, long, required = true)]
        filename: Vec<PathBuf>,
        /// Names the instance of each pod in a cell and its price, for every provider:
        /// "ec2-us-east-1" is built in, anything else is a file (docs/annotations.md).
        #[arg(long)]
        catalogue: Option<PathBuf>,
    },
    /// Simulates a day of cells in a cloud with faults, and reports violations of invariants (exit
    /// code 1). Needs no daemon. The same seed makes the same trace.
    Simulate(SimulateArguments),
    /// Prints the version.
    Version,
}

/// Result of a command.
#[derive(Debug)]
struct Output {
    text: String,
    code: ExitCode,
}

/// Fails if a pod would be refused.
impl From<Explanation> for Output {
    fn from(explained: Explanation) -> Self {
        let is_refused = explained.pods.iter().any(|pod| pod.is_refused);
        let code = if is_refused { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        Self { text: explained.to_string(), code }
    }
}

impl From<String> for Output {
    fn from(text: String) -> Self {
        Self { text, code: ExitCode::SUCCESS }
    }
}

/// The command's input is wrong.
#[derive(Debug)]
struct UsageError(String);

/// Runs a command line that begins with the program's name. `git_commit` is the commit of the
/// build, if known.
pub fn run(
    arguments: impl IntoIterator<Item = OsString>,
    git_commit: Option<&'static str>,
) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        // clap returns help and version as errors.
        Err(error) => {
            // A failed write can't be reported.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match execute(arguments.command, git_commit) {
        Ok(Output { text, code }) => print(&text, code),
        Err(UsageError(text)) => {
            // A failed write can't be reported.
            let _ = writeln!(io::stderr(), "{}", text.trim_end());
            ExitCode::from(EXIT_USAGE)
        }
    }
}

fn print(text: &str, code: ExitCode) -> ExitCode {
    let written = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    if written.is_ok() { code } else { ExitCode::FAILURE }
}

/// Runs a command, and returns its output.
fn execute(command: Command, git_commit: Option<&'static str>) -> Result<Output, UsageError> {
    match command {
        Command::Serve { config, log_format, take_over } => {
            let telemetry = telemetry::init(log_format).map_err(UsageError)?;
            // The daemon's memory has the CA's key and credentials of registries.
            if let Err(error) = core_dump::forbid() {
                tracing::warn!(%error, "core dumps not disabled");
            }
            // The log reports the error, in its own format.
            let ended = |code: ExitCode, error: &str| {
                tracing::error!(%error, "daemon failed");
                Ok(Output { text: String::new(), code })
            };
            match config::load(&config) {
                Err(problems) => ended(ExitCode::from(EXIT_USAGE), &problems.to_string()),
                Ok(loaded) => {
                    let recent_log = telemetry.recent_log.clone();
                    match app::run(&config, loaded, take_over, recent_log, git_commit) {
                        Ok(()) => Ok(String::new().into()),
                        Err(error) => ended(ExitCode::FAILURE, &error_chain(&*error)),
                    }
                }
            }
        }
        Command::CheckConfig { config, live } => {
            let loaded = load(&config)?;
            let summary = summary::of(&config, &loaded);
            Ok(if live { live_check::run(&loaded, summary) } else { summary.into() })
        }
        Command::Explain { config, filename, catalogue } => {
            let config = load(&config)?;
            let named = catalogue.as_deref();
            let catalogue = named.map(catalogues::read).transpose()?;
            let files =
                kiyot_manifest::files::read(&filename, &mut io::stdin()).map_err(UsageError)?;
            let manifest = manifest::parse_files(&files)
                .map_err(|problems| UsageError(problems.to_string()))?;
            let prices = match &catalogue {
                Some(file) => Prices::Catalogue(&file.catalogue),
                None => Prices::BuiltIn,
            };
            let mut output = Output::from(explain::explain(&config, &manifest, prices));
            if let (Some(name), Some(file)) = (named, &catalogue) {
                output.text += &catalogues::notes(name, &file.set_aside);
            }
            Ok(output)
        }
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Version => Ok(version(git_commit).into()),
    }
}

fn version(git_commit: Option<&str>) -> String {
    let commit = git_commit.unwrap_or("unknown");
    format!("kiyot {}, commit {commit}, CRI v1\n", env!("CARGO_PKG_VERSION"))
}

fn load(path: &Path) -> Result<config::Config, UsageError> {
    config::load(path).map_err(|problems| UsageError(problems.to_string()))
}

#[cfg(test)]
mod tests;
