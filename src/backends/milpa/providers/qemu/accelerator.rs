//! The accelerator of virtual machines: KVM where a guest runs under it, otherwise TCG.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_link::vm_file::{Accelerator, NOT_USABLE, VmFile};
use tokio::{process::Command, sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::super::{ErrorClass, ProviderError};
use crate::config::AcceleratorChoice;

/// The memory of the machine that a probe boots, in MiB.
pub(super) const MEMORY_MIB: u64 = 256;
/// The command line of its kernel, which prints from the start.
const COMMAND_LINE: &str = "console=ttyS0 earlyprintk=ttyS0 panic=-1";
/// The device of KVM.
const KVM: &str = "/dev/kvm";
/// The subcommand of the cells' program.
const PROBE: &str = "probe-vm";
/// Bounds the time of a probe. The subcommand bounds the boot.
const LIMIT: Duration = Duration::from_secs(20);

/// The outcome of a probe; `None` until it is known.
type Outcome = Option<Result<Accelerator, ProviderError>>;

/// Finds the accelerator, once for each run of the daemon, which does not outlive a boot.
#[derive(Debug)]
pub(super) struct Probe {
    choice: AcceleratorChoice,
    program: PathBuf,
    dir: PathBuf,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    outcome: watch::Receiver<Outcome>,
    _task: AbortOnDropHandle<()>,
}

impl Probe {
    /// Returns a probe in a directory by the cells' program. Has no side effects.
    pub(super) fn new(choice: AcceleratorChoice, program: PathBuf, dir: PathBuf) -> Self {
        Self { choice, program, dir, running: Mutex::default() }
    }

    /// Begins the probe in the background, unless it is done or runs. A failed one is repeated.
    pub(super) fn begin(&self, machine: &VmFile) -> watch::Receiver<Outcome> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |running: &Running| matches!(&*running.outcome.borrow(), Some(Err(_)));
        if let Some(running) = running.as_ref().filter(|running| !failed(running)) {
            return running.outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        let machine = VmFile {
            accelerator: Accelerator::Kvm,
            command_line: COMMAND_LINE.to_owned(),
            ..machine.clone()
        };
        let (choice, program, dir) = (self.choice, self.program.clone(), self.dir.clone());
        let task = tokio::spawn(async move {
            let found = find(choice, &program, &dir, machine).await;
            match &found {
                Ok(accelerator) => tracing::info!(%accelerator, ?choice, "accelerator chosen"),
                Err(error) => {
                    let error = error as &dyn std::error::Error;
                    tracing::warn!(error, "accelerator not probed, will be retried");
                }
            }
            sender.send_replace(Some(found));
        });
        let task = AbortOnDropHandle::new(task);
        *running = Some(Running { outcome: outcome.clone(), _task: task });
        outcome
    }

    /// Returns the accelerator, once it is known.
    pub(super) async fn wait(&self, machine: &VmFile) -> Result<Accelerator, ProviderError> {
        let mut outcome = self.begin(machine);
        let known = outcome.wait_for(Option::is_some).await;
        known.ok().and_then(|known| known.clone()).unwrap_or_else(|| {
            let doing = "probe the accelerator: the probe was stopped";
            Err(ProviderError::without_cause(ErrorClass::Transient, doing))
        })
    }
}

async fn find(
    choice: AcceleratorChoice,
    program: &Path,
    dir: &Path,
    machine: VmFile,
) -> Result<Accelerator, ProviderError> {
    match choice {
        AcceleratorChoice::Kvm => return Ok(Accelerator::Kvm),
        AcceleratorChoice::Tcg => return Ok(Accelerator::Tcg),
        // A node without the device, or without its driver.
        AcceleratorChoice::Auto => match File::open(KVM) {
            Err(error) if is_absent(&error) => return Ok(Accelerator::Tcg),
            _ => {}
        },
    }
    let failed = |error: io::Error| ProviderError::transient("probe the accelerator", error);
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    machine.write(&dir.join("vm.json")).map_err(|error| failed(io::Error::other(error)))?;
    let mut command = Command::new(program);
    command.arg(PROBE).arg("--dir").arg(dir).kill_on_drop(true).current_dir("/");
    command.stdin(std::process::Stdio::null());
    let ended = timeout(LIMIT, command.output()).await;
    let ended = ended.map_err(|_| ProviderError::too_slow("probe the accelerator", LIMIT))?;
    let ended = ended.map_err(failed)?;
    match ended.status.code() {
        Some(0) => Ok(Accelerator::Kvm),
        Some(NOT_USABLE) => Ok(Accelerator::Tcg),
        _ => {
            let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
            Err(failed(io::Error::other(format!("{}: {said}", ended.status))))
        }
    }
}

fn is_absent(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::NODEV | Errno::NXIO))
}
