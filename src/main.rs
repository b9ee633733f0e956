//! Daemon `kiyot`; see `kiyot help`.

use std::process::ExitCode;

/// Short-lived memory of a cell's start lies between memory that stays. The system's allocator
/// keeps these gaps: with a thousand cells, as much again as is used. `.cargo/config.toml`
/// configures jemalloc.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The commit of the build, which the Makefile gives. In this small crate, so that another commit
/// compiles no library.
const GIT_COMMIT: Option<&str> = option_env!("KIYOT_GIT_COMMIT");

fn main() -> ExitCode {
    kiyot::cli::run(std::env::args_os(), GIT_COMMIT.unwrap_or_default())
}
