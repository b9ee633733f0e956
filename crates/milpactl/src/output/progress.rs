//! Progress of long work, on the standard error while it is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The time between two turns of the spinner.
const TURN: Duration = Duration::from_millis(120);

/// A line that says what the program waits for. Dropping it erases the line.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Shows the line.
    pub(crate) fn begin(what: impl Into<String>) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(what.into());
        bar.enable_steady_tick(TURN);
        Self(bar)
    }

    /// Changes the text of the line.
    pub(crate) fn set(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// Writes to the standard output while the line is hidden.
    pub(crate) fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
