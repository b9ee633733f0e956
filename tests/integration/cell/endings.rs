//! The end of a container that has just said something.

use std::{
    fs,
    sync::atomic::{AtomicU32, Ordering},
};

use kiyot_testkit::{Kiyot, LIMIT, RunningContainer, wait_until};

use super::faults::processes;

/// A container ends when it is let.
///
/// containerd 1.6 closes the pipe of a process that has ended together with what it has not yet read of it (`Task.Delete` of its client), on the node and in
/// cells alike. Of a burst of lines just before the end the last ones may then be in no log at all, and nobody could bring them home.
pub(super) struct Ending(String);

impl Ending {
    /// One of a container that has not begun.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(format!("/tmp/end-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// What the container's script waits with.
    pub(super) fn wait(&self) -> String {
        format!("until [ -e {} ]; do sleep 0.05; done", self.0)
    }

    /// Lets it end, without a call to its runtime.
    pub(super) fn come(&self) {
        let waiting = self.waiting();
        assert!(!waiting.is_empty(), "somebody waits for {}", self.0);
        for pid in waiting {
            fs::write(format!("/proc/{pid}/root{}", self.0), "").unwrap();
        }
    }

    /// Waits until the process of the container has ended, whoever was told.
    pub(super) async fn came(&self) {
        wait_until("the container has ended", LIMIT, async || self.waiting().is_empty().then_some(())).await;
    }

    fn waiting(&self) -> Vec<String> {
        processes(&[&self.wait()])
    }
}

/// Waits until the log of a container has a line in its cell, the only one of its daemon.
pub(super) async fn said_in_its_cell(kiyot: &Kiyot<'_>, container: &RunningContainer, line: &str) {
    let log = kiyot.state().join("cells").join(kiyot.cells().remove(0)).join("pod/logs").join(&container.id).join("0.log");
    let end = format!(" {line}\n");
    wait_until(format!("{} has {line:?}", log.display()), LIMIT, async || fs::read_to_string(&log).ok()?.contains(&end).then_some(())).await;
}
