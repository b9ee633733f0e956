//! A virtual machine, and the commands that run on it.

use std::{
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use kiyot_testkit::command::tail;
use tempfile::TempDir;

use crate::image::{self, Variant};

/// Time limit of a boot, which takes half a minute on an idle host.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Time limit of a command. Starting a pod takes half a minute on an idle host.
pub(crate) const COMMAND_LIMIT: Duration = Duration::from_secs(600);
/// Time limit until QEMU's socket exists.
const SOCKET_LIMIT: Duration = Duration::from_secs(60);
/// Poll interval for QEMU's socket and for the end of QEMU.
const SOCKET_POLL: Duration = Duration::from_millis(20);
/// Memory of the machine in MiB, enough for two containerds and some cells.
const MEMORY_MIB: &str = "2048";

/// Held by the running machine: the host has memory and processors for one machine at a time.
static MACHINE_LOCK: Mutex<()> = Mutex::new(());

/// A running machine. Dropping it ends QEMU and removes its files.
#[derive(Debug)]
pub(crate) struct Machine {
    qemu: Child,
    commands: BufReader<UnixStream>,
    number: u64,
    boot: String,
    directory: TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    /// Standard output and standard error, interleaved.
    pub(crate) output: String,
}

/// Waits until no other machine of these tests runs.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    MACHINE_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    /// Boots a machine and waits until its services are up.
    pub(crate) fn start() -> Self {
        let turn = turn();
        let debian = image::debian(Variant::Node);
        let directory = tempfile::Builder::new().prefix("node").tempdir().unwrap();
        let parts = image::parts(directory.path());
        let socket = directory.path().join("commands");
        let console = directory.path().join("console");
        let disk = |file: PathBuf, id: &str| {
            let drive = format!("file={},if=none,id={id},format=raw,snapshot=on", file.display());
            [
                "-drive".to_owned(),
                drive,
                "-device".to_owned(),
                format!("nvme,drive={id},serial={id}"),
            ]
        };
        let qemu = Command::new("qemu-system-x86_64")
            // A second processor costs a quarter more of the host's time, and more beside other
            // tests: emulated processors wait for each other.
            .args(["-accel", "tcg", "-smp", "1", "-m", MEMORY_MIB, "-cpu", "Nehalem"])
            .args(["-machine", "q35", "-nodefaults", "-no-user-config", "-display", "none"])
            .arg("-kernel")
            .arg(debian.join("kernel"))
            // The kernel has drivers for these disks and ports built in: an initramfs is not
            // needed.
            .args([
                "-append",
                "root=/dev/nvme0n1 rw console=ttyS0 quiet mitigations=off cryptomgr.notests \
                systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all net.ifnames=0",
            ])
            .args(disk(debian.join("root.ext4"), "root"))
            .args(disk(parts, "parts"))
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-chardev")
            .arg(format!("socket,id=commands,path={},server=on,wait=off", socket.display()))
            .args(["-serial", "chardev:commands"])
            // QEMU puts the snapshots of the disks here.
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU starts: scripts/setup installs it");
        let begun = Instant::now();
        let commands = loop {
            match UnixStream::connect(&socket) {
                Ok(commands) => break commands,
                Err(error) if begun.elapsed() > SOCKET_LIMIT => panic!("QEMU's socket: {error}"),
                Err(_) => sleep(SOCKET_POLL),
            }
        };
        let mut machine = Self {
            qemu,
            commands: BufReader::new(commands),
            number: 0,
            boot: String::new(),
            directory,
            _turn: turn,
        };
        machine.wait_for_boot();
        machine
    }

    /// Waits for a boot with a new id, and until the services are up.
    fn wait_for_boot(&mut self) {
        let begun = Instant::now();
        loop {
            let line = self.line(begun, BOOT_LIMIT, "the machine boots");
            if let Some((_, boot)) = line.split_once("ready ")
                && boot != self.boot
            {
                boot.clone_into(&mut self.boot);
                break;
            }
        }
        self.ok("systemctl is-system-running --wait || systemctl --failed");
        eprintln!("booted after {:.1} s", begun.elapsed().as_secs_f64());
    }

    /// Reboots the machine as an administrator does.
    pub(crate) fn reboot(&mut self) {
        // The command server ends with the machine, so no response is awaited.
        self.send("systemctl --no-block reboot");
        self.wait_for_boot();
    }

    /// Runs a bash script that powers the machine off, and waits for the end of QEMU.
    pub(crate) fn ends(mut self, script: &str) {
        let begun = Instant::now();
        self.send(script);
        while self.qemu.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < COMMAND_LIMIT, "{script}: the machine goes on");
            sleep(SOCKET_POLL);
        }
    }

    /// Runs a bash script.
    pub(crate) fn run(&mut self, script: &str) -> CommandOutput {
        let begun = Instant::now();
        self.send(script);
        let own = format!("{} ", self.number);
        loop {
            let line = self.line(begun, COMMAND_LIMIT, script);
            let Some(rest) = line.strip_prefix(&own) else { continue };
            let (code, output) = rest.split_once(' ').unwrap_or((rest, ""));
            let output = BASE64_STANDARD.decode(output).expect("output in base64");
            let output = String::from_utf8_lossy(&output).into_owned();
            eprintln!("{:>6.1} s  {script}", begun.elapsed().as_secs_f64());
            return CommandOutput { code: code.parse().expect("an exit code"), output };
        }
    }

    fn send(&mut self, script: &str) {
        self.number += 1;
        let line = format!("{} {}\n", self.number, BASE64_STANDARD.encode(script));
        self.commands.get_mut().write_all(line.as_bytes()).expect("QEMU takes commands");
    }

    /// Runs a script that must succeed, and returns its output.
    pub(crate) fn ok(&mut self, script: &str) -> String {
        let result = self.run(script);
        assert_eq!(result.code, 0, "{script}\n{}", result.output);
        result.output
    }

    /// Runs a script until it succeeds, and returns its last output.
    pub(crate) fn eventually(&mut self, script: &str) -> String {
        let seconds = COMMAND_LIMIT.as_secs() / 2;
        self.ok(&format!(
            "until output=$( {script} ); do [ $SECONDS -lt {seconds} ] || \
            {{ echo \"in vain: $output\"; exit 1; }}; \
             sleep 0.2; done; echo \"$output\""
        ))
    }

    /// Reads the next line from the machine.
    fn line(&mut self, begun: Instant, limit: Duration, what: &str) -> String {
        let mut line = Vec::new();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            assert!(!left.is_zero(), "{what}: not done within {limit:?}");
            self.commands.get_ref().set_read_timeout(Some(left)).unwrap();
            match self.commands.read_until(b'\n', &mut line) {
                Ok(0) => panic!("QEMU has ended: {:?}", self.qemu.wait()),
                Ok(_) if line.ends_with(b"\n") => {
                    return String::from_utf8_lossy(&line).trim_end().to_owned();
                }
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => panic!("QEMU's socket: {error}"),
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        if std::thread::panicking() {
            eprintln!("the machine's console:\n{}", tail(&self.directory.path().join("console")));
        }
    }
}
