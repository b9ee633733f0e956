//! State of the link to the gateway, and detection of an orphaned cell.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// File with the time at which the link was lost, in seconds since boot; absent while the cell is
/// linked. A restarted agent continues the orphan timeout from it.
const FILE: &str = "without-contact-since";

/// State of the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// The gateway has accepted a control connection at this time.
    Linked(Instant),
    /// The control connection was lost at this time.
    Unlinked(Instant),
}

/// Tracks the state of the link, and persists when it was lost.
#[derive(Debug)]
pub(super) struct LinkMonitor {
    file: PathBuf,
    state: watch::Sender<LinkState>,
    orphan_timeout: Duration,
}

impl LinkMonitor {
    /// Starts unlinked, since now or since an earlier run of the agent lost the link.
    pub(super) fn new(dir: &Path, orphan_timeout: Duration) -> Self {
        let file = dir.join(FILE);
        let now = Instant::now();
        let uptime = uptime();
        let lost_at =
            std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok());
        // A time in the future was written before a reboot.
        let elapsed = lost_at
            .zip(uptime)
            .and_then(|(lost_at, uptime)| uptime.checked_sub(lost_at))
            .map_or(Duration::ZERO, Duration::from_secs);
        let since = now.checked_sub(elapsed).unwrap_or(now);
        if elapsed.is_zero() {
            write(&file, uptime);
        }
        Self { file, state: watch::Sender::new(LinkState::Unlinked(since)), orphan_timeout }
    }

    pub(super) fn state(&self) -> watch::Receiver<LinkState> {
        self.state.subscribe()
    }

    /// Records that the gateway has called over a control connection.
    pub(super) fn linked(&self) {
        // If the file remains, a restarted agent may only count as orphaned too early.
        if let Err(error) = std::fs::remove_file(&self.file) {
            tracing::debug!(%error, "link loss record not removed");
        }
        self.state.send_replace(LinkState::Linked(Instant::now()));
    }

    /// Records that the control connection has ended.
    pub(super) fn unlinked(&self) {
        write(&self.file, uptime());
        self.state.send_replace(LinkState::Unlinked(Instant::now()));
    }

    /// Returns when the cell has been unlinked for the orphan timeout.
    pub(super) async fn orphaned(&self) {
        let mut state = self.state.subscribe();
        loop {
            let now = *state.borrow_and_update();
            // The sender lives as long as `self`, so `changed` can't fail.
            match now {
                LinkState::Linked(_) => {
                    let _ = state.changed().await;
                }
                LinkState::Unlinked(since) => tokio::select! {
                    () = tokio::time::sleep_until(since + self.orphan_timeout) => return,
                    _ = state.changed() => {}
                },
            }
        }
    }
}

fn write(file: &Path, uptime: Option<u64>) {
    let written = uptime.map(|uptime| std::fs::write(file, uptime.to_string()));
    if let Some(Err(error)) = written {
        tracing::warn!(%error, "link loss not recorded");
    }
}

/// Returns the seconds since boot, suspend included. Unlike the wall clock, this clock is never
/// set.
fn uptime() -> Option<u64> {
    std::fs::read_to_string("/proc/uptime").ok()?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn unlinked_cell_is_orphaned_after_the_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let link_monitor = LinkMonitor::new(dir.path(), TIMEOUT);
        let begin = Instant::now();
        link_monitor.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);

        link_monitor.linked();
        assert!(
            tokio::time::timeout(TIMEOUT * 3, link_monitor.orphaned()).await.is_err(),
            "linked"
        );
        link_monitor.unlinked();
        let begin = Instant::now();
        link_monitor.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);
    }

    #[tokio::test]
    async fn restarted_agent_continues_the_orphan_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        drop(LinkMonitor::new(dir.path(), TIMEOUT));
        assert!(file.exists());
        std::fs::write(&file, "0").unwrap();
        // The machine has been up for some seconds at least.
        let up = Duration::from_secs(uptime().unwrap());
        let LinkState::Unlinked(since) = *LinkMonitor::new(dir.path(), TIMEOUT).state().borrow()
        else {
            panic!("not linked yet")
        };
        assert!(since.elapsed() >= up);
        // As if written before a reboot.
        std::fs::write(&file, u64::MAX.to_string()).unwrap();
        let link_monitor = LinkMonitor::new(dir.path(), TIMEOUT);
        let LinkState::Unlinked(since) = *link_monitor.state().borrow() else {
            panic!("not linked yet")
        };
        assert!(since.elapsed() < up);
        link_monitor.linked();
        assert!(!file.exists());
        link_monitor.unlinked();
        assert!(file.exists());
    }
}
