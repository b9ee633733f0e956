//! `kiyot-cell init`: PID 1 of a cell. It keeps containerd and the agent running, and its end is
//! the end of all that runs in the cell.

pub mod bounded_log;
pub mod containerd;
pub mod loopback;
pub mod mounts;
pub mod root;
pub mod supervisor;

use std::{
    io,
    net::{Ipv4Addr, TcpListener},
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt},
        process::CommandExt,
    },
    path::Path,
    process::Command,
    time::Duration,
};

use kiyot_link::bootstrap::{CellFile, CellFileError};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Signal, set_parent_process_death_signal},
};

use crate::{
    dirs::{CellDir, DirError},
    init::{
        bounded_log::BoundedLog,
        containerd::Settings,
        supervisor::{Service, Supervisor},
    },
};

/// How much of what init, agent and containerd print is kept, in bytes for each file, twice over:
/// the one before is kept beside it.
pub const MAX_LOG_BYTES: u64 = 1024 * 1024;

/// The agent's exit code for "power off".
pub const POWER_OFF_EXIT_CODE: i32 = 42;

/// Why init could not begin.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Started by hand.
    #[error("init is for PID 1 of a cell, and this is process {0}")]
    NotFirst(u32),
    /// Who launched the cell is gone already.
    #[error("the process that launched this cell is gone")]
    Orphaned,
    /// Its directory.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The cell's file.
    #[error(transparent)]
    CellFile(#[from] CellFileError),
    /// A mount.
    #[error(transparent)]
    Mount(#[from] mounts::MountError),
    /// A step that has no better name than what it does.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Is the cell's init until the agent says "power off". Returns the exit code.
pub fn run(dir: &Path) -> Result<i32, InitError> {
    let step = |what| move |source| InitError::Step(what, source);
    if std::process::id() != 1 {
        return Err(InitError::NotFirst(std::process::id()));
    }
    follow_parent()?;
    let dir = CellDir::open(dir)?;
    let file = CellFile::read(&dir.cell_file())?;
    make_dirs(&dir).map_err(step("make the cell's directories"))?;
    mounts::prepare(&dir, &file)?;
    loopback::up().map_err(step("bring up the loopback"))?;
    let overlay = containerd::supports_overlay(&dir);
    let stream_port = free_port().map_err(step("find a port for containerd's streaming server"))?;
    let settings = Settings { file: &file, dir: &dir, stream_port, overlay };
    std::fs::write(dir.containerd_toml(), settings.render())
        .map_err(step("write containerd's configuration"))?;

    let mut supervisor = Supervisor::start().map_err(step("watch for the exits of processes"))?;
    let console = BoundedLog::open(dir.console_log(), MAX_LOG_BYTES)
        .map_err(step("open the console's file"))?;
    let containerd_log = BoundedLog::open(dir.containerd_log(), MAX_LOG_BYTES)
        .map_err(step("open containerd's log"))?;

    let mut containerd = Command::new(&file.containerd);
    containerd.arg("--config").arg(dir.containerd_toml());
    supervisor.add(
        Service::new("containerd", containerd, None, &containerd_log)
            .map_err(step("prepare containerd"))?,
    );

    let mut agent = Command::new("/proc/self/exe");
    // What it is called in the list of processes.
    agent
        .arg0("kiyot-cell")
        .arg("agent")
        .arg("--dir")
        .arg(dir.path())
        .arg("--stream-port")
        .arg(stream_port.to_string());
    let agent = Service::new("agent", agent, Some(POWER_OFF_EXIT_CODE), &console)
        .map_err(step("prepare the agent"))?;
    // An agent that cannot run cannot notice that the cell is an orphan.
    supervisor.add(agent.with_max_failing(Duration::from_secs(file.bootstrap.orphan_timeout_secs)));

    supervisor.run(&console);
    Ok(0)
}

/// Ends this process, and so the cell, when `launch` exits.
fn follow_parent() -> Result<(), InitError> {
    let step = |what| move |error: rustix::io::Errno| InitError::Step(what, error.into());
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(step("follow launch"))?;
    // It may have ended before: then nobody holds the other end of standard input.
    let stdin = io::stdin();
    let mut input = [PollFd::new(&stdin, PollFlags::empty())];
    poll(&mut input, Some(&rustix::event::Timespec::default()))
        .map_err(step("look at standard input"))?;
    if input[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
        Err(InitError::Orphaned)
    } else {
        Ok(())
    }
}

fn make_dirs(dir: &CellDir) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    for path in [
        dir.root(),
        dir.containerd_metadata(),
        dir.containerd_opt(),
        dir.no_cni(),
        dir.agent(),
        dir.memory(),
    ] {
        builder.create(path)?;
    }
    // Containers that are not root's look up paths beneath these.
    for path in [dir.pod(), dir.pod().join(crate::agent::logs::LOG_DIR)] {
        builder.create(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// A port that nothing listens on: nothing but us is in the network namespace yet.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
