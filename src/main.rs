//! The daemon `kiyot`: see `kiyot help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kiyot::cli::run(std::env::args_os())
}
