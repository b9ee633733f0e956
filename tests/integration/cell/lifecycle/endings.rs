//! The end of a container after its last output.

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use kiyot_testkit::{Kiyot, LIMIT, RunningContainer, wait_until};
use rustix::fs::{Mode, OFlags};

use crate::cell::failures::faults::processes;

/// A signal for which a container waits before it continues, usually to its end.
///
/// When a process exits, containerd 1.6 closes the pipe without reading the rest of the output
/// (`Task.Delete` of its client), on the node and in cells. Output that is written just before the
/// end may therefore be missing in the log. A container whose log is checked ends by an `Ending`.
pub(crate) struct Ending(String);

impl Ending {
    /// Creates an ending for containers that are not started yet.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(format!("/tmp/end-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Returns the script that waits for this ending.
    pub(crate) fn script(&self) -> String {
        format!("until [ -e {} ]; do sleep 0.05; done", self.0)
    }

    /// Lets the container continue when its containerd has read all its output. Makes no call to a
    /// runtime, because the runtime would have to answer while the container ends.
    pub(crate) async fn release(&self) {
        wait_until("containerd has read the container's output", LIMIT, async || {
            let waiting = self.waiting();
            (!waiting.is_empty() && waiting.iter().all(|pid| is_drained(pid))).then_some(())
        })
        .await;
        let mut let_go = 0;
        for pid in self.waiting() {
            match fs::write(format!("/proc/{pid}/root{}", self.0), "") {
                Ok(()) => let_go += 1,
                // The process was a fork of the shell that had not yet executed `sleep`, and has
                // ended since. Until then a fork has the shell's command line.
                Err(error) => {
                    assert!(!self.waiting().contains(&pid), "{error}: {pid} waits for {}", self.0)
                }
            }
        }
        assert!(let_go > 0, "no container waits for {}", self.0);
    }

    /// Waits, without a call to a runtime, until the container's process has ended.
    pub(crate) async fn wait_until_exited(&self) {
        wait_until("the container has ended", LIMIT, async || {
            self.waiting().is_empty().then_some(())
        })
        .await;
    }

    fn waiting(&self) -> Vec<String> {
        processes(&[&self.script()])
    }
}

/// Returns whether the pipes between a container's process and its containerd are empty: the pipes
/// of the process, and the pipes of its parent, the shim.
fn is_drained(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let parent =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)).unwrap_or("0");
    let entries = fs::read_dir(format!("/proc/{parent}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let named = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| {
            ["-stdout", "-stderr"].iter().any(|end| to.to_string_lossy().ends_with(end))
        })
    };
    let outputs = [1, 2].map(|fd| PathBuf::from(format!("/proc/{pid}/fd/{fd}")));
    outputs.into_iter().chain(entries.filter(named)).all(|pipe| is_empty(&pipe))
}

/// Returns whether a pipe is empty. An absent pipe counts as empty, and a terminal is not a pipe.
fn is_empty(pipe: &Path) -> bool {
    if !fs::metadata(pipe).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
        return true;
    }
    let opened =
        rustix::fs::open(pipe, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    opened.map_or(true, |pipe| rustix::io::ioctl_fionread(&pipe).is_ok_and(|unread| unread == 0))
}

/// Waits until the log in the daemon's only cell has a line of a container.
pub(crate) async fn wait_for_cell_log(kiyot: &Kiyot<'_>, container: &RunningContainer, line: &str) {
    let log = kiyot
        .state()
        .join("cells")
        .join(kiyot.cells().remove(0))
        .join("pod/logs")
        .join(&container.id)
        .join("0.log");
    let end = format!(" {line}\n");
    wait_until(format!("{} has {line:?}", log.display()), LIMIT, async || {
        fs::read_to_string(&log).ok()?.contains(&end).then_some(())
    })
    .await;
}
