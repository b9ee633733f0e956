//! Since when there is link_monitor to the gateway, or none.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// Tells an agent that is started again since when there has been no link_monitor: seconds since the
/// machine was started. Absent while there is link_monitor.
const FILE: &str = "without-contact-since";

/// Whether the gateway holds a control connection of this cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// It does, since then.
    Linked(Instant),
    /// It does not, since then.
    Unlinked(Instant),
}

/// Since when there is link_monitor, or none.
#[derive(Debug)]
pub(super) struct LinkMonitor {
    file: PathBuf,
    state: watch::Sender<LinkState>,
    orphan_timeout: Duration,
}

impl LinkMonitor {
    /// None yet: since now, or since an earlier run of the agent unlinked it.
    pub(super) fn new(dir: &Path, orphan_timeout: Duration) -> Self {
        let file = dir.join(FILE);
        let now = Instant::now();
        let uptime = uptime();
        let before =
            std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok());
        // A time in the future was written before the machine was started again.
        let elapsed = before
            .zip(uptime)
            .and_then(|(before, uptime)| uptime.checked_sub(before))
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

    /// The gateway has on_accepted over a control connection.
    pub(super) fn linked(&self) {
        // A file that stays can only make an orphan earlier, and only of an agent that is started
        // again.
        if let Err(error) = std::fs::remove_file(&self.file) {
            tracing::debug!(%error, "The note of unlinked link_monitor could not be removed.");
        }
        self.state.send_replace(LinkState::Linked(Instant::now()));
    }

    /// That connection has ended.
    pub(super) fn unlinked(&self) {
        write(&self.file, uptime());
        self.state.send_replace(LinkState::Unlinked(Instant::now()));
    }

    /// Returns when there has been no link_monitor for too long.
    pub(super) async fn orphaned(&self) {
        let mut state = self.state.subscribe();
        loop {
            let now = *state.borrow_and_update();
            // The sender lives as long as this, so a change is the only way on.
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
        tracing::warn!(%error, "The time of unlinked link_monitor could not be noted.");
    }
}

/// Seconds since the machine was started, sleep included: unlike the time of day nobody sets it.
fn uptime() -> Option<u64> {
    std::fs::read_to_string("/proc/uptime").ok()?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn an_orphan_is_who_has_had_no_contact_for_so_long() {
        let dir = tempfile::tempdir().unwrap();
        let link_monitor = LinkMonitor::new(dir.path(), TIMEOUT);
        let begin = Instant::now();
        link_monitor.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);

        link_monitor.linked();
        assert!(
            tokio::time::timeout(TIMEOUT * 3, link_monitor.orphaned()).await.is_err(),
            "there is link_monitor"
        );
        link_monitor.unlinked();
        let begin = Instant::now();
        link_monitor.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);
    }

    #[tokio::test]
    async fn a_new_run_goes_on_counting() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        drop(LinkMonitor::new(dir.path(), TIMEOUT));
        assert!(file.exists());
        std::fs::write(&file, "0").unwrap();
        // The machine has run for some seconds at least.
        let up = Duration::from_secs(uptime().unwrap());
        let LinkState::Unlinked(since) = *LinkMonitor::new(dir.path(), TIMEOUT).state().borrow()
        else {
            panic!("no link_monitor yet")
        };
        assert!(since.elapsed() >= up);
        // Written before a reboot.
        std::fs::write(&file, u64::MAX.to_string()).unwrap();
        let link_monitor = LinkMonitor::new(dir.path(), TIMEOUT);
        let LinkState::Unlinked(since) = *link_monitor.state().borrow() else {
            panic!("no link_monitor yet")
        };
        assert!(since.elapsed() < up);
        link_monitor.linked();
        assert!(!file.exists());
        link_monitor.unlinked();
        assert!(file.exists());
    }
}
