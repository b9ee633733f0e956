//! The recent lines of the daemon's own log, for the support bundle.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
};

/// Bounds the lines that are kept.
const MAX_LINES: usize = 2000;
/// Bounds a line in bytes.
const MAX_LINE_BYTES: usize = 2048;
/// Begin of a terminal's control sequence.
const ESCAPE: char = '\u{1b}';

/// The recent lines. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct RecentLog(Arc<Mutex<VecDeque<Line>>>);

/// A line as it was written, cut at the bound.
type Line = Arc<[u8]>;

/// Copy of the lines, which holds no lock.
#[derive(Debug)]
pub(crate) struct Lines(Vec<Line>);

/// Writer of log lines to standard error that also keeps them.
#[derive(Debug)]
pub(crate) struct Tee(RecentLog);

impl RecentLog {
    pub(crate) fn tee(&self) -> Tee {
        Tee(self.clone())
    }

    fn add(&self, line: &[u8]) {
        let line = line.get(..MAX_LINE_BYTES).unwrap_or(line);
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_LINES {
            lines.pop_front();
        }
        lines.push_back(line.into());
    }

    /// Returns all lines. Loggers wait only while pointers are copied.
    pub(crate) fn lines(&self) -> Lines {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Lines(lines.iter().cloned().collect())
    }
}

impl Lines {
    /// Returns the text of the lines, without the colours of a terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.0 {
            text.push_str(&without_colours(String::from_utf8_lossy(line).trim_end()));
            text.push('\n');
        }
        text
    }
}

impl Write for Tee {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // The subscriber writes a whole line at once.
        self.0.add(line);
        io::stderr().write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Removes sequences such as `ESC [ 2 m`.
fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character != ESCAPE {
            plain.push(character);
        } else if characters.next() == Some('[') {
            characters.by_ref().find(char::is_ascii_alphabetic);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_lines_are_dropped_and_long_lines_are_cut() {
        let log = RecentLog::default();
        for number in 0..MAX_LINES + 1 {
            log.add(format!("{number}\n").as_bytes());
        }
        log.add("x".repeat(MAX_LINE_BYTES + 1).as_bytes());
        let text = log.lines().text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (MAX_LINES, "2"));
        assert_eq!(lines[MAX_LINES - 1].len(), MAX_LINE_BYTES);
    }

    #[test]
    fn colours_are_removed() {
        let log = RecentLog::default();
        log.add("\u{1b}[2m2026\u{1b}[0m \u{1b}[32m INFO\u{1b}[0m started\n".as_bytes());
        assert_eq!(log.lines().text(), "2026  INFO started\n");
    }
}
