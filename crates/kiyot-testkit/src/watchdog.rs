//! Watchdog of hanging tests.

use std::{
    process::abort,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use crate::allowed;

/// Time after which a test is aborted.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Watches a test until it is dropped. Names a test that runs longer than [`LIMIT`], and aborts its
/// process.
#[derive(Debug)]
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches the test of this thread. `on_timeout` runs before the process is aborted.
    pub fn start(on_timeout: impl FnOnce() + Send + 'static) -> Self {
        let (alive, watched) = channel::<()>();
        let limit = allowed(LIMIT);
        let test = thread::current().name().unwrap_or("a test").to_owned();
        thread::spawn(move || {
            if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: it has run for more than {limit:?}");
                on_timeout();
                abort();
            }
        });
        Self { _alive: alive }
    }
}
