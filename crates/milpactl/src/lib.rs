//! milpactl: the command-line client of the daemon's admin API.
//!
//! `cli` has the arguments of a command, and a file of `verbs` runs it: it calls the daemon through
//! `client`, finds objects by `names`, and prints through `output`. See docs/milpactl.md.

use std::{ffi::OsString, io, process::ExitCode};

use clap::Parser;

mod age;
mod cli;
mod client;
mod error;
mod money;
mod names;
mod output;
mod pod_object;
mod ports;
mod selector;
mod session;
mod signals;
pub mod spdy;
mod static_pods;
mod terminal;
mod verbs;

use cli::Arguments;
use error::Error;

/// Runs a command with the arguments of a process, and returns its exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(help) => {
            // A closed output is not an error.
            let _ = help.print();
            return if help.use_stderr() {
                ExitCode::from(error::USAGE)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => {
            let ended = runtime.block_on(verbs::run(arguments));
            // A write to a pipe that is full and not read may still block a thread.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(Error::Output(error)),
    };
    match ended {
        Ok(code) => code,
        // Readers such as `head` close it.
        Err(Error::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("milpactl: {}", error.text());
            ExitCode::from(error.exit_code())
        }
    }
}
