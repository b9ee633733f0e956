//! The daemon `kiyot`: see `kiyot help`.

use std::process::ExitCode;

/// What a cell needs for some seconds at its start lies between what it needs for good. The
/// system's allocator keeps those gaps: with a thousand cells as much again as is in use. How it is
/// set up is in `.cargo/config.toml`.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    kiyot::cli::run(std::env::args_os())
}
