//! The command-line client of the daemon's admin API.

use std::process::ExitCode;

fn main() -> ExitCode {
    milpactl::run(std::env::args_os())
}
