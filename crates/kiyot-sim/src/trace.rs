//! The trace of a simulation: a line per event, and a digest of all lines.

use std::{fmt, io::Write, time::Duration};

use ring::digest::{Context, SHA256};

/// The trace of a simulation.
pub(super) struct Trace<'a> {
    digest: Context,
    writer: Option<&'a mut dyn Write>,
    pub(super) lines: u64,
}

impl<'a> Trace<'a> {
    pub(super) fn new(writer: Option<&'a mut dyn Write>) -> Self {
        Self { digest: Context::new(&SHA256), writer, lines: 0 }
    }

    pub(super) fn line(&mut self, now: Duration, text: fmt::Arguments<'_>) {
        self.lines += 1;
        let line = format!("{:>12.3} {text}\n", now.as_secs_f64());
        self.digest.update(line.as_bytes());
        if let Some(writer) = &mut self.writer {
            // The digest includes lines that could not be written.
            let _ = writer.write_all(line.as_bytes());
        }
    }

    pub(super) fn sha256(self) -> String {
        hex::encode(self.digest.finish())
    }
}

impl fmt::Debug for Trace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("lines", &self.lines).finish_non_exhaustive()
    }
}
