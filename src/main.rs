//! Daemon `kiyot`; see `kiyot help`.

use std::process::ExitCode;

/// A cell's start allocates short-lived memory between memory that stays. The system's allocator
/// never returns these gaps: with a thousand cells they are as large as the used memory.
/// `.cargo/config.toml` configures jemalloc.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Commit of the build, set by the Makefile. This small crate reads it, so that a new commit
/// recompiles no library.
const GIT_COMMIT: Option<&str> = option_env!("KIYOT_GIT_COMMIT");

fn main() -> ExitCode {
    kiyot::cli::run(std::env::args_os(), GIT_COMMIT.filter(|commit| !commit.is_empty()))
}
