//! Capture of a thread's log.

use std::{
    io,
    sync::{Arc, LazyLock, Mutex},
};

use tracing::{Dispatch, Level, level_filters::LevelFilter, subscriber::DefaultGuard};

/// A second subscriber. With a single subscriber, `tracing` disables a line for all threads if the
/// first thread that reaches the line has no log.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| {
    let silent = tracing_subscriber::fmt().with_max_level(LevelFilter::OFF);
    Dispatch::new(silent.with_writer(io::sink).finish())
});

/// The log of the creating thread, level "info" and above, until it is dropped. All tasks of a
/// current-thread runtime write to it.
#[derive(Debug)]
pub struct CapturedLog {
    text: Text,
    _guard: DefaultGuard,
}

#[derive(Debug, Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl CapturedLog {
    /// Starts the capture.
    pub fn start() -> Self {
        LazyLock::force(&SECOND);
        let text = Text::default();
        let own = text.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(Level::INFO)
            .with_writer(move || own.clone())
            .finish();
        Self { text, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Returns the captured lines.
    pub fn lines(&self) -> Vec<String> {
        let text = self.text.0.lock().unwrap();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }
}
