//! Power-off of a machine of the cell's own, and its timer.
//!
//! A launch whose response was lost may leave a machine that no daemon knows. Its agent can't
//! enrol, so the timer ends the machine. A hanging agent can't enforce the orphan timeout, so an
//! enrolled agent renews the timer, which otherwise ends the machine.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use nix::sys::reboot::{RebootMode, reboot};
use rustix::time::{ClockId, clock_gettime};

/// Seconds from [`arm`] to the power-off, unless the boot data has another number.
const DEFAULT_DEADLINE_SECS: u64 = 900;
/// Interval at which the timer looks for the certificate, and for renewals.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// File on a tmpfs whose time of modification the agent changes at [`RENEWAL_INTERVAL`].
const RENEWED: &str = "/run/kiyot/renewed";
/// Interval at which the agent renews the timer. It equals the interval of the checks, because an
/// orphan timeout of a few seconds is allowed.
const RENEWAL_INTERVAL: Duration = CHECK_INTERVAL;

/// Timer that powers the machine off unless the cell enrols and its agent then renews the timer.
#[derive(Debug, Clone)]
pub(crate) struct PowerOff(Arc<Timer>);

#[derive(Debug)]
struct Timer {
    /// Seconds from boot to [`arm`].
    armed: u64,
    /// Seconds from [`arm`] to the power-off.
    deadline: AtomicU64,
    /// File that exists once the cell has enrolled.
    certificate: Mutex<Option<PathBuf>>,
    /// Seconds without a renewal, once enrolled, to the power-off.
    renewal: AtomicU64,
}

impl PowerOff {
    /// Sets the time of the power-off, in seconds from [`arm`].
    pub(crate) fn set_deadline(&self, seconds: u64) {
        self.0.deadline.store(seconds, Ordering::Relaxed);
    }

    /// Sets the certificate's file. Once it exists, the machine powers off `renewal` seconds after
    /// the agent's last renewal instead.
    pub(crate) fn renewed_after(&self, certificate: PathBuf, renewal: u64) {
        self.0.renewal.store(renewal, Ordering::Relaxed);
        *self.0.certificate.lock().unwrap_or_else(PoisonError::into_inner) = Some(certificate);
    }
}

impl Timer {
    /// Returns whether the cell has enrolled.
    fn is_enrolled(&self) -> bool {
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        certificate.as_ref().is_some_and(|path| path.exists())
    }

    fn run(&self) {
        while !self.is_enrolled() {
            let elapsed = uptime_secs().saturating_sub(self.armed);
            if elapsed >= self.deadline.load(Ordering::Relaxed) {
                eprintln!("kiyot-cell: not enrolled within {elapsed} s, powering off");
                now();
            }
            thread::sleep(CHECK_INTERVAL);
        }
        let limit = self.renewal.load(Ordering::Relaxed);
        let mut renewals = Renewals::default();
        while !renewals.are_overdue(modified(Path::new(RENEWED)), limit) {
            thread::sleep(CHECK_INTERVAL);
        }
        eprintln!("kiyot-cell: agent has not renewed the timer for {limit} s, powering off");
        now();
    }
}

/// Renewals that the timer has seen. Time is counted in checks, not by a clock, so that a suspended
/// machine does not end when it resumes.
#[derive(Debug, Default)]
struct Renewals {
    last: Option<SystemTime>,
    /// Checks since the last change.
    unchanged: u64,
}

impl Renewals {
    /// Records a check, and returns whether the last `limit` checks saw no change.
    fn are_overdue(&mut self, renewed: Option<SystemTime>, limit: u64) -> bool {
        self.unchanged = if renewed == self.last { self.unchanged + 1 } else { 0 };
        self.last = renewed;
        self.unchanged > limit / CHECK_INTERVAL.as_secs()
    }
}

/// Returns the file's time of modification, `None` if it is absent.
fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().ok()?.modified().ok()
}

/// Renews the timer at an interval, for the agent.
pub(crate) async fn renew() {
    let file = || {
        std::fs::create_dir_all(Path::new(RENEWED).parent().unwrap_or(Path::new("/")))?;
        File::options().write(true).create(true).truncate(false).open(RENEWED)
    };
    loop {
        if let Err(error) = file().and_then(|file| file.set_modified(SystemTime::now())) {
            tracing::warn!(%error, file = RENEWED, "power-off timer not renewed");
        }
        tokio::time::sleep(RENEWAL_INTERVAL).await;
    }
}

/// Returns the time since boot in seconds, with the time in which the machine was suspended.
fn uptime_secs() -> u64 {
    u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap_or(u64::MAX)
}

/// Starts the timer.
pub(crate) fn arm() -> io::Result<PowerOff> {
    let timer = Arc::new(Timer {
        armed: uptime_secs(),
        deadline: AtomicU64::new(DEFAULT_DEADLINE_SECS),
        certificate: Mutex::default(),
        renewal: AtomicU64::new(DEFAULT_DEADLINE_SECS),
    });
    let armed = PowerOff(Arc::clone(&timer));
    thread::Builder::new().name("power-off".into()).spawn(move || timer.run())?;
    Ok(armed)
}

/// Powers the machine off. Nothing is synced, because the disk ends with the machine.
pub(crate) fn now() -> ! {
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("kiyot-cell: cannot power off: {error}");
    // The kernel panics when PID 1 exits, and reboots by its parameter `panic`.
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies V102.
    #[test]
    fn machine_ends_when_its_agent_stops_renewing_the_timer() {
        let mut renewals = Renewals::default();
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        // The agent has not renewed the timer yet.
        assert!((0..3).all(|_| !renewals.are_overdue(None, 3)));
        // A modification time that goes back is a change too.
        for renewed in [at(20), at(10), at(30)] {
            assert!((0..4).all(|_| !renewals.are_overdue(renewed, 3)), "{renewed:?}");
        }
        assert!(renewals.are_overdue(at(30), 3));
    }
}
