//! The accelerator of virtual machines: KVM if a guest runs under it, otherwise TCG.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_config::AcceleratorChoice;
use kiyot_engine::provider::{ErrorClass, ProviderError};
use kiyot_link::vm_file::{Accelerator, NOT_USABLE, VmFile};
use tokio::{process::Command, sync::watch, time::timeout};
use tokio_util::task::AbortOnDropHandle;

/// The memory of the machine that a probe boots, in MiB.
pub(super) const MEMORY_MIB: u64 = 256;
/// The command line of the probe's kernel, which prints from its start.
const COMMAND_LINE: &str = "console=ttyS0 earlyprintk=ttyS0 panic=-1";
const KVM: &str = "/dev/kvm";
/// The subcommand of the cells' program that probes.
const PROBE: &str = "probe-vm";
/// Bounds the time of a probe. The subcommand bounds the boot.
const LIMIT: Duration = Duration::from_secs(20);

/// The outcome of a probe; `None` until it is known.
type ProbeOutcome = Option<Result<Accelerator, ProviderError>>;

/// Finds the accelerator once in a run of the daemon, which does not outlive a boot of the node.
#[derive(Debug)]
pub(super) struct Probe {
    choice: AcceleratorChoice,
    program: PathBuf,
    dir: PathBuf,
    device: PathBuf,
    limit: Duration,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    outcome: watch::Receiver<ProbeOutcome>,
    _task: AbortOnDropHandle<()>,
}

impl Probe {
    /// Returns a probe that runs the cells' program in a directory. Has no side effects.
    pub(super) fn new(choice: AcceleratorChoice, program: PathBuf, dir: PathBuf) -> Self {
        let (device, limit) = (KVM.into(), LIMIT);
        Self { choice, program, dir, device, limit, running: Mutex::default() }
    }

    /// Begins the probe in the background, unless it runs or has succeeded.
    pub(super) fn begin(&self, machine: &VmFile) -> watch::Receiver<ProbeOutcome> {
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
        let (device, limit) = (self.device.clone(), self.limit);
        let task = tokio::spawn(async move {
            let found = match choice {
                AcceleratorChoice::Kvm => Ok(Accelerator::Kvm),
                AcceleratorChoice::Tcg => Ok(Accelerator::Tcg),
                AcceleratorChoice::Auto if is_absent(&device) => Ok(Accelerator::Tcg),
                AcceleratorChoice::Auto => find(&program, &dir, machine, limit).await,
            };
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

    /// Waits for the probe, and returns the accelerator.
    pub(super) async fn wait(&self, machine: &VmFile) -> Result<Accelerator, ProviderError> {
        let mut outcome = self.begin(machine);
        let known = outcome.wait_for(Option::is_some).await;
        known.ok().and_then(|known| known.clone()).unwrap_or_else(|| {
            let doing = "probe the accelerator: the probe was stopped";
            Err(ProviderError::without_cause(ErrorClass::Transient, doing))
        })
    }
}

/// Returns KVM if a kernel has printed under KVM, otherwise TCG.
async fn find(
    program: &Path,
    dir: &Path,
    machine: VmFile,
    limit: Duration,
) -> Result<Accelerator, ProviderError> {
    let failed = |error: io::Error| ProviderError::transient("probe the accelerator", error);
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    machine.write(&dir.join("vm.json")).map_err(|error| failed(io::Error::other(error)))?;
    let mut command = Command::new(program);
    command.arg(PROBE).arg("--dir").arg(dir).kill_on_drop(true).current_dir("/");
    command.stdin(std::process::Stdio::null());
    let ended = timeout(limit, command.output()).await;
    let ended = ended.map_err(|_| ProviderError::too_slow("probe the accelerator", limit))?;
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

/// Returns whether the node has no KVM device, or no driver for it.
fn is_absent(device: &Path) -> bool {
    use rustix::io::Errno;
    let absent = [Errno::NOENT, Errno::NODEV, Errno::NXIO];
    let error = File::open(device).err().and_then(|error| Errno::from_io_error(&error));
    error.is_some_and(|error| absent.contains(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit that no probe of these tests reaches, unless it hangs.
    const LONG: Duration = Duration::from_secs(300);

    fn machine() -> VmFile {
        VmFile {
            program: "/qemu".into(),
            accelerator: Accelerator::Tcg,
            kernel: "/kernel".into(),
            initramfs: None,
            root: None,
            disk_bytes: None,
            command_line: String::new(),
            cpus: 1,
            memory_mib: MEMORY_MIB,
            user: 1,
            group: 1,
            network: None,
        }
    }

    /// A probe that runs a shell script instead of the cells' program. The script counts its runs.
    struct Played {
        dir: tempfile::TempDir,
        probe: Probe,
    }

    impl Played {
        fn new(script: &str, limit: Duration) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().display();
            let script =
                format!("#!/bin/sh\necho \"$*\" >> {at}/runs\necho $$ > {at}/pid\n{script}\n");
            let (program, device) = (dir.path().join("kiyot-cell"), dir.path().join("kvm"));
            // Written by another process, because a program can't be started while any child of
            // another thread holds it open for writing.
            let write = "cat > \"$0\" && chmod 755 \"$0\"";
            let mut shell = std::process::Command::new("sh")
                .args(["-c", write])
                .arg(&program)
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            io::Write::write_all(&mut shell.stdin.take().unwrap(), script.as_bytes()).unwrap();
            assert!(shell.wait().unwrap().success());
            std::fs::write(&device, "").unwrap();
            let probe = Probe::new(AcceleratorChoice::Auto, program, dir.path().join("probe"));
            Self { probe: Probe { device, limit, ..probe }, dir }
        }

        fn runs(&self) -> usize {
            let runs = std::fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default();
            let expected = format!("probe-vm --dir {}", self.dir.path().join("probe").display());
            assert!(runs.lines().all(|run| run == expected), "{runs}");
            runs.lines().count()
        }
    }

    /// Verifies N28.
    #[tokio::test]
    async fn result_of_a_probe_is_kept() {
        for (code, expected) in [(0, Accelerator::Kvm), (NOT_USABLE, Accelerator::Tcg)] {
            let played = Played::new(&format!("exit {code}"), LONG);
            for _ in 0..2 {
                assert_eq!(played.probe.wait(&machine()).await.unwrap(), expected, "{code}");
            }
            assert_eq!(played.runs(), 1);
            let file = VmFile::read(&played.dir.path().join("probe/vm.json")).unwrap();
            let used = (file.accelerator, file.command_line.as_str());
            assert_eq!(used, (Accelerator::Kvm, COMMAND_LINE));
        }
    }

    #[tokio::test]
    async fn failed_probe_is_repeated() {
        let played = Played::new("echo no room >&2; exit 1", LONG);
        for runs in 1..3 {
            let error = played.probe.wait(&machine()).await.unwrap_err();
            assert_eq!(error.class, ErrorClass::Transient);
            let cause = error.source.as_ref().unwrap().to_string();
            assert!(cause.contains("exit status: 1: no room"), "{cause}");
            assert_eq!(played.runs(), runs);
        }
    }

    /// Verifies N28.
    #[tokio::test]
    async fn hanging_probe_is_killed_at_its_limit_without_a_result() {
        let played = Played::new("exec sleep 1000", Duration::from_secs(1));
        let pid = kiyot_testkit::wait_until("a probe has run", kiyot_testkit::LIMIT, async || {
            let error = played.probe.wait(&machine()).await.unwrap_err();
            assert_eq!(error.class, ErrorClass::Unanswered);
            assert_eq!(error.doing, "probe the accelerator: not done within 1 s");
            // A machine under load may not have started the probe within the limit.
            let pid = std::fs::read_to_string(played.dir.path().join("pid")).ok()?;
            pid.ends_with('\n').then(|| pid.trim().to_owned())
        })
        .await;
        kiyot_testkit::wait_for("the probe was killed", || {
            std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().is_empty()
        })
        .await;
    }

    #[tokio::test]
    async fn node_without_the_device_and_a_configured_accelerator_need_no_probe() {
        let played = Played::new("exit 1", LONG);
        std::fs::remove_file(&played.probe.device).unwrap();
        assert_eq!(played.probe.wait(&machine()).await.unwrap(), Accelerator::Tcg);
        let configured = [
            (AcceleratorChoice::Kvm, Accelerator::Kvm),
            (AcceleratorChoice::Tcg, Accelerator::Tcg),
        ];
        for (choice, expected) in configured {
            let mut played = Played::new("exit 1", LONG);
            played.probe.choice = choice;
            assert_eq!(played.probe.wait(&machine()).await.unwrap(), expected);
            assert_eq!(played.runs(), 0);
        }
        assert_eq!(played.runs(), 0);
    }
}
