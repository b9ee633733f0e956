//! Power-off of a machine of the cell's own, and its timer until the cell enrols.
//!
//! A launch whose answer was lost may leave a machine that no daemon knows. Its agent can't enrol,
//! so that the timer ends it.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::reboot::{RebootMode, reboot};
use rustix::time::{ClockId, clock_gettime};

/// Time from [`arm`], in seconds, until the boot data says another.
const DEFAULT_DEADLINE_SECS: u64 = 900;
/// Interval at which the timer looks for the certificate.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Timer that powers the machine off unless the cell enrols.
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
}

impl PowerOff {
    /// Sets the time of the power-off, in seconds from [`arm`].
    pub(crate) fn set_deadline(&self, seconds: u64) {
        self.0.deadline.store(seconds, Ordering::Relaxed);
    }

    /// Sets the file whose existence cancels the power-off.
    pub(crate) fn cancelled_by(&self, certificate: PathBuf) {
        *self.0.certificate.lock().unwrap_or_else(PoisonError::into_inner) = Some(certificate);
    }
}

impl Timer {
    /// Returns true once the cell has enrolled.
    fn is_cancelled(&self) -> bool {
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        certificate.as_ref().is_some_and(|path| path.exists())
    }

    fn run(&self) {
        while !self.is_cancelled() {
            let elapsed = uptime_secs().saturating_sub(self.armed);
            if elapsed >= self.deadline.load(Ordering::Relaxed) {
                eprintln!("kiyot-cell: not enrolled within {elapsed} s, powering off");
                now();
            }
            thread::sleep(CHECK_INTERVAL);
        }
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
    });
    let armed = PowerOff(Arc::clone(&timer));
    thread::Builder::new().name("power-off".into()).spawn(move || timer.run())?;
    Ok(armed)
}

/// Powers the machine off. The disk ends with it, so that nothing is synchronised.
pub(crate) fn now() -> ! {
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("kiyot-cell: cannot power off: {error}");
    // The kernel panics when PID 1 exits, and reboots by its parameter `panic`.
    std::process::exit(1)
}
