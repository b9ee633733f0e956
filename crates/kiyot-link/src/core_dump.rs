//! Prevention of core dumps of processes that hold secrets: keys, tokens, environment variables of
//! pods.

use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Prevents core dumps of the calling process, and tracing by unprivileged processes.
///
/// The process becomes non-dumpable because the kernel ignores the limit if `core_pattern` is a
/// pipe. `execve` resets this flag, so each program calls this function at its start. Children
/// inherit the limit of 0.
pub fn forbid() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    limit(Some(0))
}

/// Raises the limit for children to the hard limit: children hold only their own secrets.
pub fn allow_children() -> io::Result<()> {
    limit(getrlimit(Resource::Core).maximum)
}

fn limit(current: Option<u64>) -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    Ok(setrlimit(Resource::Core, Rlimit { current, maximum })?)
}
