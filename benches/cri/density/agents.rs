//! Agents of many cells, in a separate process: their memory is not the daemon's, and one signal
//! freezes them all.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use kiyot_cell::uplink::Uplink;
use kiyot_link::{bootstrap::CellFile, certificate::sha256};
use kiyot_testkit::fake_cell::{FakeCell, Options};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Period of the scans of the spool directory.
const SCAN_PERIOD: Duration = Duration::from_millis(10);
/// Period of heartbeats, about as long as an agent's period.
const HEARTBEAT_PERIOD: Duration = Duration::from_secs(5);
/// Bytes at the end of an id for the number of a container.
const ID_SUFFIX_BYTES: usize = 2;

/// A process that runs agents. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Agents(Child);

impl Agents {
    /// Starts a process for `count` of the cells in the spool directory.
    pub(crate) fn start(spool: &Path, cells: &Path, count: usize) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .arg("--agents")
            .arg(count.to_string())
            .arg("--agents-spool")
            .arg(spool)
            .arg("--agents-cells")
            .arg(cells);
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .expect("the bench can be started again"),
        )
    }

    /// Stops the process with SIGSTOP: its connections stay, and are never read.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues the process.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the agents in this process, and never returns.
pub(crate) async fn run(spool: &Path, cells: &Path, count: usize) {
    let (mut started, never) = (0, CancellationToken::new());
    loop {
        for mark in fs::read_dir(spool).unwrap().flatten().map(|entry| entry.path()) {
            // The process that removes the file runs the agent.
            if started < count && fs::remove_file(&mark).is_ok() {
                started += 1;
                let dir = cells.join(mark.file_name().unwrap());
                tokio::spawn(agent(dir, never.clone()));
            }
        }
        sleep(SCAN_PERIOD).await;
    }
}

async fn agent(dir: PathBuf, never: CancellationToken) {
    let bootstrap = CellFile::read(&dir.join("cell.json")).unwrap().bootstrap;
    let id = bootstrap.cell.clone();
    let home = Uplink::new(bootstrap, &dir.join("private"), "fake").unwrap();
    // Unique, with the length of containerd's ids.
    let mut ids = sha256(id.as_bytes());
    ids.truncate(ids.len() - ID_SUFFIX_BYTES);
    let cell =
        FakeCell::new(&id, home.handle(), Options { ids, heartbeat: Some(HEARTBEAT_PERIOD) });
    Box::pin(home.run(|info| cell.service(info), never)).await;
}
