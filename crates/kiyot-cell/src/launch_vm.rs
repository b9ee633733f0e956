//! Launch of a virtual machine (`kiyot-cell launch-vm`): creates its network devices, starts QEMU,
//! and relays the link to the gateway.
//!
//! QEMU runs as `kiyot-cell run-vm` prepares it (`jail`), and ends with this process by the
//! parent-death signal.

pub mod jail;
pub mod network;
pub mod probe;
pub mod qemu;
pub mod relay;
mod space;

use std::{
    env,
    fs::File,
    io::{self, PipeReader},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
};

use kiyot_link::vm_file::{VmFile, VmFileError};
use nix::sched::{CloneFlags, setns, unshare};
use tokio::sync::oneshot;

use crate::{
    dirs::{CellDir, DirError},
    init::{MAX_LOG_BYTES, bounded_log::BoundedLog},
    launch::{self, DEFAULT_PATH, LaunchError},
};

/// Errors of a launch.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The description of the machine can't be read.
    #[error(transparent)]
    File(#[from] VmFileError),
    /// The launch was cancelled, or the cgroup or the network namespace can't be joined.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The network can't be prepared.
    #[error(transparent)]
    Network(#[from] network::NetworkError),
    /// A path can't be used.
    #[error("cannot {0} {1:?}")]
    Path(&'static str, PathBuf, #[source] io::Error),
    /// A step of the launch failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
    /// The process that started this one has ended.
    #[error("the launch process of this virtual machine has ended")]
    Orphaned,
}

/// Returns a function that names the step in which an error occurred.
fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> VmError {
    move |error| VmError::Step(what, error.into())
}

/// Waits for `GO` on standard input, launches a virtual machine and waits for its end. Returns
/// the exit code of QEMU, or 128 + n if signal n ended it.
pub fn run(dir: &Path, netns: &Path, cgroup: Option<&str>) -> Result<i32, VmError> {
    let dir = CellDir::open(dir)?;
    let console =
        BoundedLog::open(dir.console_log(), MAX_LOG_BYTES).map_err(step("open the console log"))?;
    let outcome = launch(&dir, netns, cgroup, &console);
    if let Err(error) = &outcome {
        // The provider reads the reason from the console when the cell doesn't enrol.
        console.write(format!("launch failed: {}\n", crate::with_sources(error)).as_bytes());
    }
    outcome
}

fn launch(
    dir: &CellDir,
    netns: &Path,
    cgroup: Option<&str>,
    console: &BoundedLog,
) -> Result<i32, VmError> {
    launch::wait_to_go()?;
    let file = VmFile::read(&dir.vm_file())?;
    launch::join(netns, cgroup)?;
    let link = match &file.network {
        Some(vm) => {
            network::prepare(&file, vm)?;
            let listener = relay::listen().map_err(step("listen on the link"))?;
            Some((listener, vm.gateway.clone()))
        }
        None => None,
    };
    let (machine, output) = Machine::start(dir)?;
    console.drain(output).map_err(step("read the console"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(step("start the relay"))?;
    let status = runtime.block_on(async {
        let ended = machine.ended()?;
        match link {
            Some((listener, gateway)) => tokio::select! {
                status = ended => status.map_err(io::Error::other)?,
                failed = relay::serve(listener, &gateway) => failed,
            },
            None => ended.await.map_err(io::Error::other)?,
        }
    });
    let status: ExitStatus = status.map_err(step("wait for the virtual machine"))?;
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// Running virtual machine, whose process is the first of a PID namespace.
#[derive(Debug)]
pub struct Machine(Child);

impl Machine {
    /// Starts the virtual machine of a directory. Returns its output: the console and the messages
    /// of QEMU. Must be called on the main thread before any other thread runs: the parent-death
    /// signal follows the thread, and no thread can start while children get another PID namespace.
    pub fn start(dir: &CellDir) -> Result<(Self, PipeReader), VmError> {
        let (output, writer) = io::pipe().map_err(step("create the pipe of the console"))?;
        let copy = writer.try_clone().map_err(step("duplicate the pipe of the console"))?;
        let own = File::open("/proc/self/ns/pid").map_err(step("open the PID namespace"))?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("kiyot-cell").arg("run-vm").arg("--dir").arg(dir.path()).current_dir("/");
        // QEMU must not get the daemon's settings.
        command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into()));
        command.stdin(Stdio::piped()).stdout(writer).stderr(copy);
        unshare(CloneFlags::CLONE_NEWPID).map_err(step("create the PID namespace"))?;
        let spawned = command.spawn();
        setns(&own, CloneFlags::CLONE_NEWPID).map_err(step("return to the PID namespace"))?;
        Ok((Self(spawned.map_err(step("start the virtual machine"))?), output))
    }

    /// Returns a receiver of the exit status, from a thread that waits for it.
    fn ended(mut self) -> io::Result<oneshot::Receiver<io::Result<ExitStatus>>> {
        let (sender, receiver) = oneshot::channel();
        // The virtual machine's process treats the end of its standard input as the end of this
        // process.
        let guard = self.0.stdin.take();
        thread::Builder::new().name("wait".into()).spawn(move || {
            let status = self.0.wait();
            drop(guard);
            let _unless_dropped = sender.send(status);
        })?;
        Ok(receiver)
    }

    /// Kills the virtual machine, and waits for its end.
    pub fn kill(mut self) -> io::Result<ExitStatus> {
        self.0.kill()?;
        self.0.wait()
    }
}
