//! PID 1 of a cell (`kiyot-cell init`): supervises containerd and the agent. All processes of the
//! cell end with it.

pub mod base_spec;
pub mod bounded_log;
pub mod containerd;
pub mod loopback;
pub mod mount_error;
pub mod mounts;
pub mod private;
pub mod root;
pub mod services;
pub mod supervisor;

use std::{
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use kiyot_link::bootstrap::{CellFile, CellFileError};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Signal, set_parent_process_death_signal},
};

use crate::{
    dirs::{CellDir, DirError, LOG_DIR},
    init::bounded_log::BoundedLog,
};

/// Upper bound on a log file of init, agent and containerd, in bytes. The previous file is kept
/// too.
pub const MAX_LOG_BYTES: u64 = 1024 * 1024;

/// Exit code by which the agent requests the cell's power-off.
pub const POWER_OFF_EXIT_CODE: i32 = 42;

/// Errors that keep init from starting.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Init was not started as PID 1.
    #[error("init must be PID 1 of a cell, but has PID {0}")]
    NotFirst(u32),
    /// The launch process has ended.
    #[error("the launch process of this cell has ended")]
    Orphaned,
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// `cell.json` can't be read.
    #[error(transparent)]
    CellFile(#[from] CellFileError),
    /// A mount failed.
    #[error(transparent)]
    Mount(#[from] mount_error::MountError),
    /// The services can't be started.
    #[error(transparent)]
    Services(#[from] services::ServicesError),
    /// A step of the start failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Runs init until the agent requests the power-off. Returns the exit code.
pub fn run(dir: &Path) -> Result<i32, InitError> {
    let step = |what| move |source| InitError::Step(what, source);
    if std::process::id() != 1 {
        return Err(InitError::NotFirst(std::process::id()));
    }
    follow_parent()?;
    let dir = CellDir::open(dir)?;
    let file = CellFile::read(&dir.cell_file())?;
    make_dirs(&dir).map_err(step("create the cell's directories"))?;
    let snapshotter = mounts::prepare(&dir, &file)?;
    loopback::up().map_err(step("bring up the loopback"))?;
    let console =
        BoundedLog::open(dir.console_log(), MAX_LOG_BYTES).map_err(step("open the console log"))?;
    services::run(&dir, &file, snapshotter, &console)?;
    Ok(0)
}

/// Makes the kernel kill this process, and so the cell, when the launch process ends.
fn follow_parent() -> Result<(), InitError> {
    let step = |what| move |error: rustix::io::Errno| InitError::Step(what, error.into());
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(step("set the parent-death signal"))?;
    // If the launch process has already ended, the write end of standard input is closed.
    let stdin = io::stdin();
    let mut input = [PollFd::new(&stdin, PollFlags::empty())];
    poll(&mut input, Some(&rustix::event::Timespec::default()))
        .map_err(step("poll standard input"))?;
    if input[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
        Err(InitError::Orphaned)
    } else {
        Ok(())
    }
}

/// Creates the directories of a cell.
pub(crate) fn make_dirs(dir: &CellDir) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    for path in [dir.root(), dir.containerd_disk(), dir.private(), dir.memory()] {
        builder.create(path)?;
    }
    // Containers of other users look up paths below these directories.
    for path in [dir.pod(), dir.pod().join(LOG_DIR)] {
        builder.create(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
