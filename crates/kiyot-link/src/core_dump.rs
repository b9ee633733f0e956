//! Core dumps of processes that hold secrets: keys, tokens, environment variables of pods.

use std::io;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};

/// Keeps the calling process from being dumped, and from being traced by who is not privileged, even
/// where `core_pattern` is a program, for which the kernel asks no limit. Execve undoes that, so each
/// program calls it at its start; the limit of 0 is what its children inherit.
pub fn forbid() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    limit(Some(0))
}

/// Gives children the highest limit that there may be: they have no secrets but their own.
pub fn allow_children() -> io::Result<()> {
    limit(getrlimit(Resource::Core).maximum)
}

fn limit(current: Option<u64>) -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    Ok(setrlimit(Resource::Core, Rlimit { current, maximum })?)
}
