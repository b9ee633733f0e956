//! Monitors of virtual machines: QEMU's own report on whether the guest runs (QMP, `query-status`).
//!
//! A stopped machine still has a process, and its agent is silent. A guest that took over its QEMU
//! may answer here: the socket must be QEMU's, and the answer is bounded in size and time. Without
//! an answer nothing is known, because QEMU serves a single client, which may be an operator.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kiyot_engine::id::CellId;
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::timeout,
};

use crate::qemu::{Instance, InstanceState};

/// The socket in the directory of an instance.
pub(super) const SOCKET: &str = "qmp/qmp.sock";
/// Bounds the time of an answer. Under load QEMU needs some milliseconds.
const LIMIT: Duration = Duration::from_millis(500);
/// Bounds an answer with the greeting and events before it, in bytes.
const MAX_BYTES: u64 = 16 * 1024;
/// The identifier of our command, by which its answer is recognised.
const ID: &str = "kiyot";
/// Ends the negotiation, and asks whether the machine runs (QEMU, docs/interop/qmp-spec).
const COMMANDS: &str = "{\"execute\":\"qmp_capabilities\"}\n\
                        {\"execute\":\"query-status\",\"id\":\"kiyot\"}\n";
/// States in which the guest stands still and may continue (QEMU, qapi/run-state.json).
const PAUSED: [&str; 4] = ["paused", "suspended", "debug", "watchdog"];
/// States from which a guest does not continue by itself, each with the reason of its end.
const ENDED: [(&str, &str); 4] = [
    ("internal-error", "QEMU stopped the machine: internal-error"),
    ("io-error", "QEMU stopped the machine: io-error of a disk"),
    ("guest-panicked", "the kernel of the machine panicked: guest-panicked"),
    ("shutdown", "the machine has shut down"),
];

/// The states of machines that do not run.
#[derive(Debug, Default)]
pub(super) struct Monitors(Mutex<BTreeMap<CellId, &'static str>>);

/// A state of a machine that does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Halt {
    /// The guest stands still, and may continue. Has the status.
    Paused(&'static str),
    /// The guest does not continue. Has the status and the reason.
    Ended(&'static str, &'static str),
}

/// A message of QEMU: the greeting, an event or an answer.
#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    id: Option<String>,
    #[serde(default, rename = "return")]
    answer: Option<RunState>,
}

#[derive(Deserialize)]
struct RunState {
    #[serde(default)]
    status: String,
}

impl Monitors {
    /// Returns an instance with the state that its QEMU reports. One of `owners` must own its
    /// socket.
    pub(super) async fn judge(&self, instance: Instance, dir: &Path, owners: &[u32]) -> Instance {
        if !instance.state.is_alive() {
            return instance;
        }
        // Without an answer, the running process counts.
        let Some(status) = ask(dir, owners).await else { return instance };
        let halt = halt(&status);
        self.log(&instance.cell, halt);
        match halt {
            None => instance,
            Some(Halt::Paused(_)) => Instance { state: InstanceState::Paused, ..instance },
            Some(Halt::Ended(_, reason)) => Instance {
                state: InstanceState::Stopped,
                end_reason: Some(reason.to_owned()),
                ..instance
            },
        }
    }

    fn log(&self, cell: &CellId, halt: Option<Halt>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match halt {
            Some(Halt::Paused(status) | Halt::Ended(status, _)) => {
                if known.insert(cell.clone(), status) != Some(status) {
                    tracing::warn!(%cell, status, "virtual machine does not run");
                }
            }
            None => {
                if known.remove(cell).is_some() {
                    tracing::info!(%cell, "virtual machine runs again");
                }
            }
        }
    }

    /// Removes machines that are not listed any more.
    pub(super) fn retain(&self, listed: &[Instance]) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|cell, _| listed.iter().any(|instance| instance.cell == *cell));
    }
}

/// Returns the status of a machine that does not run.
pub(super) async fn halted(dir: &Path, owners: &[u32]) -> Option<&'static str> {
    match halt(&ask(dir, owners).await?)? {
        Halt::Paused(status) | Halt::Ended(status, _) => Some(status),
    }
}

/// Returns the status of the machine in a directory; `None` without an answer in time.
async fn ask(dir: &Path, owners: &[u32]) -> Option<String> {
    timeout(LIMIT, status(&dir.join(SOCKET), owners)).await.ok()?.ok()
}

/// Returns the meaning of a status; `None` if the machine runs, or the status is unknown.
fn halt(status: &str) -> Option<Halt> {
    let paused = PAUSED.into_iter().find(|known| *known == status).map(Halt::Paused);
    let ended = ENDED.into_iter().find(|(known, _)| *known == status);
    paused.or_else(|| ended.map(|(known, reason)| Halt::Ended(known, reason)))
}

/// Asks a monitor for the status of its machine.
async fn status(socket: &Path, owners: &[u32]) -> io::Result<String> {
    let socket = open(socket, owners)?;
    // Connects by its file descriptor: the path may lead elsewhere by now.
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    let (reader, mut writer) = UnixStream::connect(path).await?.into_split();
    let mut lines = BufReader::new(reader.take(MAX_BYTES)).lines();
    // QEMU accepts commands after its greeting.
    next(&mut lines).await?;
    writer.write_all(COMMANDS.as_bytes()).await?;
    loop {
        let message = next(&mut lines).await?;
        if message.id.as_deref() == Some(ID) {
            let answer =
                message.answer.ok_or_else(|| io::Error::other("QEMU refused to answer"))?;
            return Ok(answer.status);
        }
    }
}

/// Opens a socket that one of the owners owns. QEMU of earlier versions may replace the file: a
/// link could lead the daemon to another user's socket.
fn open(socket: &Path, owners: &[u32]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(CWD, socket, flags, Mode::empty())?;
    let status = fstat(&file)?;
    let is_socket = FileType::from_raw_mode(status.st_mode) == FileType::Socket;
    if is_socket && owners.contains(&status.st_uid) {
        Ok(file)
    } else {
        Err(io::Error::other("not a socket of QEMU"))
    }
}

async fn next(
    lines: &mut tokio::io::Lines<BufReader<impl tokio::io::AsyncRead + Unpin>>,
) -> io::Result<Message> {
    let line = lines.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    serde_json::from_str(&line).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::net::UnixListener;

    use super::*;
    use crate::offering;
    use kiyot_engine::provider::InstanceId;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
    const EVENT: &str = r#"{"timestamp": {}, "event": "STOP", "data": {"id": 3}}"#;
    const NEGOTIATED: &str = r#"{"return": {}}"#;

    fn own_user() -> u32 {
        rustix::process::getuid().as_raw()
    }

    fn answer(status: &str) -> String {
        format!(r#"{{"return": {{"status": "{status}", "running": false}}, "id": "kiyot"}}"#)
    }

    /// Returns a running instance, judged by a monitor that sends these lines and then waits.
    async fn judged_by(lines: Vec<String>) -> (Instance, Monitors) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("qmp")).unwrap();
        let monitor = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
        let served = tokio::spawn(async move {
            let (mut client, _) = monitor.accept().await.unwrap();
            for line in lines {
                // The client may have disconnected.
                let _ = client.write_all(format!("{line}\r\n").as_bytes()).await;
            }
            let mut commands = Vec::new();
            let _ended = client.read_to_end(&mut commands).await;
            commands
        });
        let monitors = Monitors::default();
        let judged = monitors.judge(instance(), dir.path(), &[own_user()]).await;
        served.await.unwrap();
        (judged, monitors)
    }

    fn instance() -> Instance {
        let cell = CellId::mint().unwrap();
        let id = InstanceId(cell.to_string());
        Instance::new(id, cell, offering("1cpu-256mib"), InstanceState::Running)
    }

    async fn state(status: &str) -> (InstanceState, Option<String>) {
        let lines = [GREETING, NEGOTIATED, EVENT, &answer(status)].map(str::to_owned);
        let (judged, _) = judged_by(lines.into()).await;
        (judged.state, judged.end_reason)
    }

    /// Verifies V12.
    #[tokio::test]
    async fn machine_has_the_state_of_its_monitor() {
        for status in ["running", "prelaunch", "", "no such state"] {
            assert_eq!(state(status).await, (InstanceState::Running, None), "{status}");
        }
        for status in PAUSED {
            assert_eq!(state(status).await, (InstanceState::Paused, None), "{status}");
        }
        for (status, reason) in ENDED {
            assert_eq!(state(status).await, (InstanceState::Stopped, Some(reason.to_owned())));
        }
    }

    /// Verifies V17.
    #[tokio::test]
    async fn invalid_answer_leaves_the_machine_running() {
        let panicked = answer("guest-panicked");
        let cases: [Vec<String>; 7] = [
            vec![],
            vec![GREETING.to_owned()],
            vec!["no JSON".to_owned(), panicked.clone()],
            vec![format!("{{\"QMP\": \"{}\"}}", "x".repeat(MAX_BYTES as usize)), panicked.clone()],
            [vec![GREETING.to_owned()], vec![EVENT.to_owned(); 400], vec![panicked.clone()]]
                .concat(),
            vec![GREETING.to_owned(), panicked.replace("kiyot", "another")],
            vec![GREETING.to_owned(), r#"{"error": {}, "id": "kiyot"}"#.to_owned()],
        ];
        for lines in cases {
            let shown = lines.concat().chars().take(80).collect::<String>();
            let (judged, _) = judged_by(lines).await;
            assert_eq!(judged.state, InstanceState::Running, "{shown}");
        }
    }

    /// Verifies V17.
    #[tokio::test]
    async fn socket_of_another_owner_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [own, link, file] = ["own", "link", "file"].map(|name| dir.path().join(name));
        let listener = UnixListener::bind(&own).unwrap();
        symlink(&own, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        assert!(open(&own, &[own_user()]).is_ok());
        for (path, user) in [(&link, own_user()), (&file, own_user()), (&own, own_user() + 1)] {
            assert!(open(path, &[user]).is_err(), "{path:?} of {user}");
        }
        let accepted = futures::poll!(std::pin::pin!(listener.accept()));
        assert!(accepted.is_pending(), "nothing was connected");
    }

    #[tokio::test]
    async fn machine_that_is_not_listed_is_removed() {
        let lines = [GREETING, &answer("paused")].map(str::to_owned);
        let (judged, monitors) = judged_by(lines.into()).await;
        monitors.retain(std::slice::from_ref(&judged));
        assert_eq!(monitors.0.lock().unwrap().get(&judged.cell), Some(&"paused"));
        monitors.retain(&[]);
        assert!(monitors.0.lock().unwrap().is_empty());
    }
}
