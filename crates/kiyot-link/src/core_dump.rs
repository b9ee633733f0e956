//! Prevention of core dumps of processes that hold secrets: keys, tokens, environment variables of
//! pods.

use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Prevents core dumps of the calling process, and tracing by unprivileged processes.
///
/// The process is made non-dumpable, because the kernel ignores the limit where `core_pattern` is a
/// pipe. `execve` resets that, so each program calls this at its start. Children inherit the limit
/// of 0.
pub fn forbid() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    limit(Some(0))
}

/// Raises the limit for children to the hard limit: they hold no secrets but their own.
pub fn allow_children() -> io::Result<()> {
    limit(getrlimit(Resource::Core).maximum)
}

fn limit(current: Option<u64>) -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    Ok(setrlimit(Resource::Core, Rlimit { current, maximum })?)
}
