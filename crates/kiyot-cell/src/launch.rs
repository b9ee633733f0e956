//! `kiyot-cell launch`: makes a cell's namespaces, and starts `kiyot-cell init` in them.
//!
//! It runs with one thread: namespaces are a thread's, and the parent-death signal of init follows
//! the thread that made it.

pub mod cgroup;

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use kiyot_link::bootstrap::GO;
use nix::sched::{CloneFlags, setns, unshare};
use rustix::{
    fs::Mode,
    mount::{MountPropagationFlags, mount_change},
};

use crate::{
    dirs::{CellDir, DirError},
    namespaces::Namespaces,
};

/// Where programs are, when the environment does not say.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What of the environment the cell is given beside PATH: proxies for its containerd's pulls, and
/// what helps to find errors.
const PASSED_VARIABLES: [&str; 8] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "KIYOT_CELL_LOG",
    "RUST_BACKTRACE",
];

/// Why a cell could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Its directory.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The file of the network namespace.
    #[error("the network namespace {0:?}")]
    Netns(PathBuf, #[source] io::Error),
    /// Its standard input ended without [`GO`].
    #[error("called off: the provider ended before it had recorded this launch")]
    Cancelled,
    /// A control group.
    #[error(transparent)]
    Cgroup(#[from] cgroup::CgroupError),
    /// A step that has no better name than what it does.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Waits for [`GO`] on standard input, launches a cell and waits for its end. Returns the exit code of its init, 128 + n when signal n
/// ended it.
pub fn run(dir: &Path, netns: &Path, cgroup: Option<&str>) -> Result<i32, LaunchError> {
    let dir = CellDir::open(dir)?;
    let mut console = open_console(&dir)
        .map_err(|source| LaunchError::Step("open the console's file", source))?;
    let outcome = console
        .try_clone()
        .map_err(|source| LaunchError::Step("copy the console", source))
        .and_then(|copy| launch(&dir, netns, cgroup, copy));
    if let Err(error) = &outcome {
        // Who waits for this cell to call home looks there for the reason.
        let _ = writeln!(console, "the cell could not be launched: {}", crate::with_sources(error));
    }
    outcome
}

fn launch(
    dir: &CellDir,
    netns: &Path,
    cgroup: Option<&str>,
    console: File,
) -> Result<i32, LaunchError> {
    let mut go = [0; GO.len()];
    io::stdin().read_exact(&mut go).map_err(|_| LaunchError::Cancelled)?;
    // A mount of the host is not kept by this process either.
    env::set_current_dir("/")
        .map_err(|source| LaunchError::Step("leave the working directory", source))?;
    let netns = File::open(netns).map_err(|source| LaunchError::Netns(netns.to_owned(), source))?;
    let host = Namespaces::current()
        .map_err(|source| LaunchError::Step("name the host's namespaces", source))?;
    host.write(&dir.host_namespaces())
        .map_err(|source| LaunchError::Step("write down the host's namespaces", source))?;
    if let Some(name) = cgroup {
        cgroup::join(Path::new(cgroup::ROOT), name)?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // Refused for one that leads its process group already, which is as good.
    let _ = rustix::process::setsid();
    setns(&netns, CloneFlags::CLONE_NEWNET)
        .map_err(|error| LaunchError::Step("join the network namespace", error.into()))?;
    // Open, it would keep a mount of the host.
    drop(netns);
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC,
    )
    .map_err(|error| LaunchError::Step("make the namespaces", error.into()))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|error| LaunchError::Step("keep the cell's mounts from the host", error.into()))?;
    let mut init =
        init_command(dir, console).map_err(|source| LaunchError::Step("prepare init", source))?;
    let mut child = init.spawn().map_err(|source| LaunchError::Step("start init", source))?;
    // The write end of its standard input: init takes its end for ours.
    let alive = child.stdin.take();
    let status = child.wait().map_err(|source| LaunchError::Step("wait for init", source))?;
    drop(alive);
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

fn open_console(dir: &CellDir) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(dir.console_log())
}

fn init_command(dir: &CellDir, console: File) -> io::Result<Command> {
    let program = fs::read_link("/proc/self/exe")?;
    let mut command = Command::new(program);
    command.arg("init").arg("--dir").arg(dir.path()).current_dir("/");
    // The daemon's own settings and what systemd told it are not the cell's concern.
    command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()));
    command.envs(PASSED_VARIABLES.iter().filter_map(|name| Some((name, env::var_os(name)?))));
    command.stdin(Stdio::piped()).stdout(console.try_clone()?).stderr(console);
    Ok(command)
}
