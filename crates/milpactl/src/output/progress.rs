//! Progress of long work, on the standard error while it is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The time between two turns of the spinner.
const TURN: Duration = Duration::from_millis(120);

/// A line that says what is awaited, and goes away when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Begins to wait for something.
    pub(crate) fn begin(what: impl Into<String>) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        bar.enable_steady_tick(TURN);
        Self(bar)
    }

    /// Changes what is awaited.
    pub(crate) fn set(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// Writes to the standard output while the line is away.
    pub(crate) fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
