//! Ends a test that hangs.

use std::{
    process::abort,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use crate::allowed;

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
        let limit = allowed(LIMIT);
        let test = thread::current().name().unwrap_or("a test").to_owned();
        thread::spawn(move || {
            if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{test} hangs: it has run for more than {limit:?}");
                last_words();
                abort();
            }
        });
        Self { _alive: alive }
    }
}
