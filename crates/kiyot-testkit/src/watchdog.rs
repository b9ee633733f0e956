//! Ends a test that hangs.

use std::{
    process::abort,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

/// The longest that a test may take.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Watches a test while it lives: a test that takes longer than [`LIMIT`] is named, and its process
/// aborted.
#[derive(Debug)]
pub struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches the test of this thread. `last_words` runs before the process is aborted.
    pub fn start(last_words: impl FnOnce() + Send + 'static) -> Self {
        let (alive, watched) = channel::<()>();
        let test = thread::current().name().unwrap_or("a test").to_owned();
        thread::spawn(move || {
            if watched.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: it has run for more than {LIMIT:?}");
                last_words();
                abort();
            }
        });
        Self { _alive: alive }
    }
}
