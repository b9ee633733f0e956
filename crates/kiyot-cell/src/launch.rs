//! Launch of a cell (`kiyot-cell launch`): creates the namespaces and starts `kiyot-cell init` in
//! them.
//!
//! It runs with a single thread: setns(2) and unshare(2) affect the calling thread, and init's
//! parent-death signal follows the thread that spawned it.

pub mod cgroup;

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use kiyot_link::{bind_limits::PROXY_VARIABLES, bootstrap::GO};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::{
    fs::Mode,
    mount::{MountPropagationFlags, mount_change},
};

use crate::{
    dirs::{CellDir, DirError},
    namespaces::Namespaces,
};

/// `PATH` of the cell if the environment has no `PATH`.
pub(crate) const DEFAULT_PATH: &str =
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Settings for debugging that are passed to the cell, beside `PATH` and the proxies for pulls.
const DEBUG_VARIABLES: [&str; 2] = ["KIYOT_CELL_LOG", "RUST_BACKTRACE"];

/// Errors of a launch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The network namespace can't be opened.
    #[error("network namespace {0:?}")]
    Netns(PathBuf, #[source] io::Error),
    /// Standard input ended without [`GO`].
    #[error("launch cancelled: the provider ended before it recorded this launch")]
    Cancelled,
    /// The cgroup can't be joined.
    #[error(transparent)]
    Cgroup(#[from] cgroup::CgroupError),
    /// A step of the launch failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Returns a function that names the step in which an error occurred.
fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> LaunchError {
    move |error| LaunchError::Step(what, error.into())
}

/// Waits for [`GO`] on standard input, launches a cell and waits for its end. Returns the exit code
/// of init, or 128 + n if signal n ended it.
pub fn run(dir: &Path, netns: &Path, cgroup: Option<&str>) -> Result<i32, LaunchError> {
    let dir = CellDir::open(dir)?;
    let mut console = open_console(&dir).map_err(step("open the console log"))?;
    let outcome = console
        .try_clone()
        .map_err(step("duplicate the console log"))
        .and_then(|copy| launch(&dir, netns, cgroup, copy));
    if let Err(error) = &outcome {
        // The provider reads the reason from the console when the cell doesn't enrol.
        let _ = writeln!(console, "launch failed: {}", crate::with_sources(error));
    }
    outcome
}

fn launch(
    dir: &CellDir,
    netns: &Path,
    cgroup: Option<&str>,
    console: File,
) -> Result<i32, LaunchError> {
    wait_to_go()?;
    let host = Namespaces::current().map_err(step("read the host's namespaces"))?;
    host.write(&dir.host_namespaces()).map_err(step("record the host's namespaces"))?;
    join(netns, cgroup)?;
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC,
    )
    .map_err(step("create the namespaces"))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(step("make the cell's mounts private"))?;
    let mut init = init_command(dir, console).map_err(step("prepare init"))?;
    let mut child = init.spawn().map_err(step("start init"))?;
    // Init treats the end of its standard input as the end of this process.
    let stdin_guard = child.stdin.take();
    let status = child.wait().map_err(step("wait for init"))?;
    drop(stdin_guard);
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// Waits for [`GO`] on standard input, and leaves the working directory, which would keep a mount
/// of the host busy.
pub(crate) fn wait_to_go() -> Result<(), LaunchError> {
    let mut go = [0; GO.len()];
    io::stdin().read_exact(&mut go).map_err(|_| LaunchError::Cancelled)?;
    env::set_current_dir("/").map_err(step("leave the working directory"))
}

/// Joins the cgroup and the network namespace of a cell, in a session of its own.
pub(crate) fn join(netns: &Path, cgroup: Option<&str>) -> Result<(), LaunchError> {
    // Open no longer than this: an open file would keep a mount of the host busy.
    let netns = File::open(netns).map_err(|source| LaunchError::Netns(netns.to_owned(), source))?;
    if let Some(name) = cgroup {
        cgroup::join(Path::new(cgroup::ROOT), name)?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // Fails for a process group leader, which is as good.
    let _ = rustix::process::setsid();
    setns(&netns, CloneFlags::CLONE_NEWNET).map_err(step("join the network namespace"))
}

fn open_console(dir: &CellDir) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(dir.console_log())
}

fn init_command(dir: &CellDir, console: File) -> io::Result<Command> {
    let program = fs::read_link("/proc/self/exe")?;
    let mut command = Command::new(program);
    command.arg("init").arg("--dir").arg(dir.path()).current_dir("/");
    // The cell must not get the daemon's settings and systemd's variables.
    command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()));
    let passed = PROXY_VARIABLES.into_iter().chain(DEBUG_VARIABLES);
    command.envs(passed.filter_map(|name| Some((name, env::var_os(name)?))));
    command.stdin(Stdio::piped()).stdout(console.try_clone()?).stderr(console);
    Ok(command)
}
