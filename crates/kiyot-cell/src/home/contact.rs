//! Since when there is contact to the gateway, or none.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

/// Tells an agent that is started again since when there has been no contact: seconds since the
/// machine was started. Absent while there is contact.
const FILE: &str = "without-contact-since";

/// Whether the gateway holds a control connection of this cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// It does, since then.
    Linked(Instant),
    /// It does not, since then.
    Unlinked(Instant),
}

/// Since when there is contact, or none.
#[derive(Debug)]
pub(super) struct Contact {
    file: PathBuf,
    state: watch::Sender<LinkState>,
    orphan_timeout: Duration,
}

impl Contact {
    /// None yet: since now, or since an earlier run of the agent lost it.
    pub(super) fn new(dir: &Path, orphan_timeout: Duration) -> Self {
        let file = dir.join(FILE);
        let now = Instant::now();
        let uptime = uptime();
        let before =
            std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok());
        // A time in the future was written before the machine was started again.
        let gone_by = before
            .zip(uptime)
            .and_then(|(before, uptime)| uptime.checked_sub(before))
            .map_or(Duration::ZERO, Duration::from_secs);
        let since = now.checked_sub(gone_by).unwrap_or(now);
        if gone_by.is_zero() {
            write(&file, uptime);
        }
        Self { file, state: watch::Sender::new(LinkState::Unlinked(since)), orphan_timeout }
    }

    pub(super) fn state(&self) -> watch::Receiver<LinkState> {
        self.state.subscribe()
    }

    /// The gateway has called over a control connection.
    pub(super) fn made(&self) {
        // A file that stays can only make an orphan earlier, and only of an agent that is started
        // again.
        if let Err(error) = std::fs::remove_file(&self.file) {
            tracing::debug!(%error, "The note of lost contact could not be removed.");
        }
        self.state.send_replace(LinkState::Linked(Instant::now()));
    }

    /// That connection has ended.
    pub(super) fn lost(&self) {
        write(&self.file, uptime());
        self.state.send_replace(LinkState::Unlinked(Instant::now()));
    }

    /// Returns when there has been no contact for too long.
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
        tracing::warn!(%error, "The time of lost contact could not be noted.");
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
        let contact = Contact::new(dir.path(), TIMEOUT);
        let begin = Instant::now();
        contact.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);

        contact.made();
        assert!(
            tokio::time::timeout(TIMEOUT * 3, contact.orphaned()).await.is_err(),
            "there is contact"
        );
        contact.lost();
        let begin = Instant::now();
        contact.orphaned().await;
        assert!(begin.elapsed() >= TIMEOUT);
    }

    #[tokio::test]
    async fn a_new_run_goes_on_counting() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        drop(Contact::new(dir.path(), TIMEOUT));
        assert!(file.exists());
        std::fs::write(&file, "0").unwrap();
        // The machine has run for some seconds at least.
        let up = Duration::from_secs(uptime().unwrap());
        let LinkState::Unlinked(since) = *Contact::new(dir.path(), TIMEOUT).state().borrow() else {
            panic!("no contact yet")
        };
        assert!(since.elapsed() >= up);
        // Written before a reboot.
        std::fs::write(&file, u64::MAX.to_string()).unwrap();
        let contact = Contact::new(dir.path(), TIMEOUT);
        let LinkState::Unlinked(since) = *contact.state().borrow() else {
            panic!("no contact yet")
        };
        assert!(since.elapsed() < up);
        contact.made();
        assert!(!file.exists());
        contact.lost();
        assert!(file.exists());
    }
}
