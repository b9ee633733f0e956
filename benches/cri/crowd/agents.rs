//! The agents of many cells, in a process of their own: what they need is not the daemon's, and one
//! signal freezes them all.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use kiyot_cell::uplink::Uplink;
use kiyot_link::{bootstrap::CellFile, certificate::sha256};
use kiyot_testkit::cell::{PlayedCell, Ways};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Between two looks at the spool.
const LOOK: Duration = Duration::from_millis(10);
/// As often as an agent's.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// What is left of an id of containerd's for the number of a container.
const NUMBER: usize = 2;

/// A process that plays agents. Killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Agents(Child);

impl Agents {
    /// Plays `most` of the cells whose programs leave a mark in the spool.
    pub(crate) fn start(spool: &Path, cells: &Path, most: usize) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .arg("--agents")
            .arg(most.to_string())
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

    /// Stops all of them where they are: their connections stay, and are never read.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets them go on.
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

/// The process itself: never returns.
pub(crate) async fn play(spool: &Path, cells: &Path, most: usize) {
    let (mut played, never) = (0, CancellationToken::new());
    loop {
        for mark in fs::read_dir(spool).unwrap().flatten().map(|entry| entry.path()) {
            // Whoever takes a mark away plays its cell.
            if played < most && fs::remove_file(&mark).is_ok() {
                played += 1;
                let dir = cells.join(mark.file_name().unwrap());
                tokio::spawn(agent(dir, never.clone()));
            }
        }
        sleep(LOOK).await;
    }
}

async fn agent(dir: PathBuf, never: CancellationToken) {
    let bootstrap = CellFile::read(&dir.join("cell.json")).unwrap().bootstrap;
    let id = bootstrap.cell.clone();
    let home = Uplink::new(bootstrap, &dir.join("private"), "played").unwrap();
    // As long as containerd's ids, and no other cell's.
    let mut ids = sha256(id.as_bytes());
    ids.truncate(ids.len() - NUMBER);
    let cell = PlayedCell::new(&id, home.handle(), Ways { ids, heartbeat: Some(HEARTBEAT) });
    Box::pin(home.run(|info| cell.service(info), never)).await;
}
