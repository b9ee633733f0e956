//! The command line of `kiyot`.
//!
//! Exit codes: 0; 64 (`EX_USAGE` of sysexits.h) for wrong arguments, configurations and manifests;
//! 1 for everything else.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use kiyot_link::core_dump;

use crate::{app, config, manifest};

mod explain;
mod summary;
mod telemetry;

use telemetry::LogFormat;

/// Of wrong arguments, configurations and manifests.
const EXIT_USAGE: u8 = 64;

/// Where packages put the configuration.
const CONFIG: &str = "/etc/kiyot/kiyot.toml";

/// The file name that stands for the standard input.
const STDIN: &str = "-";

/// A CRI endpoint that gives annotated pods a cell of their own.
#[derive(Debug, Parser)]
#[command(name = "kiyot", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answers the kubelet, until SIGTERM or SIGINT.
    Serve {
        /// The configuration.
        #[arg(long, default_value = CONFIG)]
        config: PathBuf,
        /// How log lines look. Which there are is said by KIYOT_LOG, such as "info" or
        /// "kiyot=debug".
        #[arg(long, value_enum, default_value_t)]
        log_format: LogFormat,
    },
    /// Says all that is wrong with a configuration, or what it amounts to.
    CheckConfig {
        /// The configuration.
        #[arg(long, default_value = CONFIG)]
        config: PathBuf,
    },
    /// Says where the pods of a manifest would go, why, and what of them would be refused (exit
    /// code 1). Needs no daemon.
    Explain {
        /// The configuration.
        #[arg(long, default_value = CONFIG)]
        config: PathBuf,
        /// Kubernetes YAML with one or more pods; "-" is the standard input.
        #[arg(short, long)]
        filename: PathBuf,
    },
    /// Says which kiyot this is.
    Version,
}

/// What a command says in the end.
#[derive(Debug)]
struct Output {
    text: String,
    code: ExitCode,
}

impl From<String> for Output {
    fn from(text: String) -> Self {
        Self { text, code: ExitCode::SUCCESS }
    }
}

/// What a command was given is wrong.
#[derive(Debug)]
struct Wrong(String);

/// Runs a command line, the program's name first.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        // Help and version are "errors" of clap too.
        Err(error) => {
            // Nobody is left to tell if this can't be written.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match execute(arguments.command) {
        Ok(Output { text, code }) => print(&text, code),
        Err(Wrong(text)) => {
            // Nobody is left to tell if this can't be written.
            let _ = writeln!(io::stderr(), "{}", text.trim_end());
            ExitCode::from(EXIT_USAGE)
        }
    }
}

fn print(text: &str, code: ExitCode) -> ExitCode {
    let written = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    if written.is_ok() { code } else { ExitCode::FAILURE }
}

/// Does what a command says, and returns what to print.
fn execute(command: Command) -> Result<Output, Wrong> {
    match command {
        Command::Serve { config, log_format } => {
            telemetry::init(log_format).map_err(Wrong)?;
            // It holds the keys of the cells' authority and credentials of registries.
            if let Err(error) = core_dump::forbid() {
                tracing::warn!(%error, "core dumps of the daemon are possible");
            }
            // What ends the daemon stands in its log, in the log's own form.
            let ended = |code: ExitCode, error: &str| {
                tracing::error!(%error, "The daemon ends");
                Ok(Output { text: String::new(), code })
            };
            match config::load(&config) {
                Err(problems) => ended(ExitCode::from(EXIT_USAGE), &problems.to_string()),
                Ok(loaded) => match app::run(&config, loaded) {
                    Ok(()) => Ok(String::new().into()),
                    Err(error) => ended(ExitCode::FAILURE, &chain(&*error)),
                },
            }
        }
        Command::CheckConfig { config } => Ok(summary::of(&config, &load(&config)?).into()),
        Command::Explain { config, filename } => {
            let config = load(&config)?;
            let name = filename.display().to_string();
            let yaml = read(&filename)
                .map_err(|error| Wrong(format!("{name}: can't be read: {error}")))?;
            let manifest =
                manifest::parse(&name, &yaml).map_err(|problems| Wrong(problems.to_string()))?;
            Ok(explain::explain(&config, &manifest))
        }
        Command::Version => Ok(format!("kiyot {}, CRI v1\n", env!("CARGO_PKG_VERSION")).into()),
    }
}

fn load(path: &Path) -> Result<config::Config, Wrong> {
    config::load(path).map_err(|problems| Wrong(problems.to_string()))
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // One byte more than is allowed: the parser then says so.
    let limit = manifest::MAX_BYTES as u64 + 1;
    if path == Path::new(STDIN) {
        io::stdin().take(limit).read_to_string(&mut text)?;
    } else {
        std::fs::File::open(path)?.take(limit).read_to_string(&mut text)?;
    }
    Ok(text)
}

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
