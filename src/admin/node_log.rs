//! The log of a container on the node, in the format of CRI logs: `TIME STREAM TAG TEXT`, where the
//! tag is `F` for a whole line and `P` for a part of it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    mem,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use kiyot_proto::admin::ReadLogResponse;

/// Bytes of a read.
const READ_BYTES: usize = 64 * 1024;
/// Bounds a line: the daemon writes at most 16 KiB of text, after 40 bytes of time and tag.
const MAX_LINE_BYTES: usize = 32 * 1024;
/// Bounds the bytes in which the last lines are searched.
const MAX_TAIL_BYTES: u64 = 64 * 1024 * 1024;

/// The wanted part of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Wanted {
    /// The last lines; `None` for all.
    pub(super) lines: Option<u64>,
    /// The time of the first line, in nanoseconds since 1970; 0 for all.
    pub(super) since_unix_nanos: i64,
}

/// Text of one of the streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    is_stderr: bool,
    text: Vec<u8>,
}

impl From<Part> for ReadLogResponse {
    fn from(part: Part) -> Self {
        let (text, none) = (part.text.into(), Default::default());
        if part.is_stderr {
            Self { stdout: none, stderr: text }
        } else {
            Self { stdout: text, stderr: none }
        }
    }
}

/// A reader of a log, through its rotations.
#[derive(Debug)]
pub(super) struct NodeLog {
    path: PathBuf,
    file: File,
    wanted: Wanted,
    /// Bytes of an incomplete line.
    rest: Vec<u8>,
    /// True until the end of a line that is left out because it is too long.
    skips_line: bool,
}

impl NodeLog {
    /// Opens a log at the first wanted line.
    pub(super) fn open(path: &Path, wanted: Wanted) -> io::Result<Self> {
        Self::open_within(path, wanted, MAX_TAIL_BYTES)
    }

    /// Opens a log, and searches its last lines in its last `tail` bytes.
    fn open_within(path: &Path, wanted: Wanted, tail: u64) -> io::Result<Self> {
        let mut file = open(path)?;
        let mut begin = Begin::default();
        if let Some(lines) = wanted.lines {
            begin = begin_of_last(&mut file, lines, tail)?;
            file.seek(SeekFrom::Start(begin.offset))?;
        }
        let skips_line = begin.is_within_line;
        Ok(Self { path: path.to_owned(), file, wanted, rest: Vec::new(), skips_line })
    }

    /// Reads the next part; `None` at the current end. Continues with the new file after a
    /// rotation.
    pub(super) fn next_part(&mut self) -> io::Result<Option<Vec<Part>>> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let read = self.file.read(&mut buffer)?;
            if read > 0 {
                return Ok(Some(self.take(&buffer[..read])));
            }
            if !self.is_rotated() {
                return Ok(None);
            }
            // Reads what was written before the rotation. The daemon has opened the new file and
            // adds nothing to the old file.
            let read = self.file.read(&mut buffer)?;
            if read > 0 {
                return Ok(Some(self.take(&buffer[..read])));
            }
            self.file = open(&self.path)?;
        }
    }

    fn is_rotated(&self) -> bool {
        let id = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let named = std::fs::symlink_metadata(&self.path).map(id);
        matches!((named, self.file.metadata().map(id)), (Ok(named), Ok(own)) if named != own)
    }

    /// Adds bytes of the file, and returns the text of the complete lines.
    fn take(&mut self, bytes: &[u8]) -> Vec<Part> {
        self.rest.extend_from_slice(bytes);
        let mut parts = Vec::new();
        let mut begin = 0;
        while let Some(length) = self.rest[begin..].iter().position(|byte| *byte == b'\n') {
            let line = &self.rest[begin..begin + length];
            begin += length + 1;
            if !mem::take(&mut self.skips_line)
                && line.len() <= MAX_LINE_BYTES
                && let Some(entry) = Entry::parse(line)
                && entry.is_since(self.wanted.since_unix_nanos)
            {
                entry.append_to(&mut parts);
            }
        }
        self.rest.drain(..begin);
        if self.rest.len() > MAX_LINE_BYTES {
            // The daemon writes no line of this length.
            self.rest.clear();
            self.skips_line = true;
        }
        parts
    }
}

fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// The begin of the last lines of a log.
#[derive(Debug, Default)]
struct Begin {
    offset: u64,
    /// True if the lines begin after the next line end.
    is_within_line: bool,
}

/// Returns the begin of the last lines that are complete in the last `tail` bytes.
fn begin_of_last(file: &mut File, lines: u64, tail: u64) -> io::Result<Begin> {
    let end = file.metadata()?.len();
    if lines == 0 {
        return Ok(Begin { offset: end, is_within_line: false });
    }
    let limit = end.saturating_sub(tail);
    let mut buffer = vec![0; READ_BYTES];
    let (mut at, mut found) = (end, 0);
    while at > limit {
        let begin = at.saturating_sub(READ_BYTES as u64).max(limit);
        let length = usize::try_from(at - begin).unwrap_or(READ_BYTES);
        file.seek(SeekFrom::Start(begin))?;
        file.read_exact(&mut buffer[..length])?;
        for (index, _) in
            buffer[..length].iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n')
        {
            let after = begin + index as u64 + 1;
            // No line begins after the last line end.
            if after < end {
                found += 1;
            }
            if found == lines {
                return Ok(Begin { offset: after, is_within_line: false });
            }
        }
        at = begin;
    }
    // Includes the byte before, which may be a line end.
    Ok(Begin { offset: limit.saturating_sub(1), is_within_line: limit > 0 })
}

/// A line of a log.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    time: &'a [u8],
    is_stderr: bool,
    /// The text of the line, or of a part of it.
    text: &'a [u8],
    is_partial: bool,
}

impl<'a> Entry<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(4, |byte| *byte == b' ');
        let (time, stream, tag) = (fields.next()?, fields.next()?, fields.next()?);
        let is_stderr = match stream {
            b"stdout" => false,
            b"stderr" => true,
            _ => return None,
        };
        let is_partial = tag.split(|byte| *byte == b':').next() == Some(b"P");
        Some(Self { time, is_stderr, text: fields.next().unwrap_or_default(), is_partial })
    }

    fn is_since(&self, unix_nanos: i64) -> bool {
        if unix_nanos <= 0 {
            return true;
        }
        let time = std::str::from_utf8(self.time).ok();
        let time = time.and_then(|time| time.parse::<Timestamp>().ok());
        time.is_none_or(|time| time.as_nanosecond() >= i128::from(unix_nanos))
    }

    /// Appends the text to the last part, or to a new part for another stream.
    fn append_to(&self, parts: &mut Vec<Part>) {
        if parts.last().is_none_or(|part| part.is_stderr != self.is_stderr) {
            parts.push(Part { is_stderr: self.is_stderr, text: Vec::new() });
        }
        let Some(part) = parts.last_mut() else { return };
        part.text.extend_from_slice(self.text);
        if !self.is_partial {
            part.text.push(b'\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    /// Returns the texts of standard output and standard error.
    fn text(parts: &[Part]) -> Vec<(String, String)> {
        let text = |part: &Part| {
            let text = String::from_utf8(part.text.clone()).unwrap();
            if part.is_stderr { (String::new(), text) } else { (text, String::new()) }
        };
        parts.iter().map(text).collect()
    }

    fn file(lines: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, lines).unwrap();
        (dir, path)
    }

    const LINES: &str = "2026-11-25T10:00:00.000000001Z stdout F one\n\
                         2026-11-25T10:00:01.5Z stdout P tw\n\
                         2026-11-25T10:00:01.5Z stdout F o\n\
                         2026-11-25T10:00:02Z stderr F three\n";

    #[test]
    fn streams_stay_in_order_and_parts_of_a_line_are_joined() {
        let (_dir, path) = file(LINES);
        let mut log = NodeLog::open(&path, Wanted::default()).unwrap();
        let expected =
            vec![("one\ntwo\n".to_owned(), String::new()), (String::new(), "three\n".to_owned())];
        assert_eq!(text(&log.next_part().unwrap().unwrap()), expected);
        assert!(log.next_part().unwrap().is_none());
    }

    #[test]
    fn only_lines_since_a_time_are_read() {
        let (_dir, path) = file(LINES);
        let since: Timestamp = "2026-11-25T10:00:01.6Z".parse().unwrap();
        let nanos = i64::try_from(since.as_nanosecond()).unwrap();
        let wanted = Wanted { since_unix_nanos: nanos, ..Wanted::default() };
        let mut log = NodeLog::open(&path, wanted).unwrap();
        let parts = log.next_part().unwrap().unwrap();
        assert_eq!(text(&parts), [(String::new(), "three\n".to_owned())]);
    }

    /// A cell that was taken over may write anything.
    #[test]
    fn too_long_lines_are_left_out_and_each_line_is_filtered_by_its_own_time() {
        let (_dir, path) = file("");
        let mut log = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        let since = "2026-11-25T10:00:00Z";
        log.write_all(b"2026-11-25T10:00:01Z stdout F before\n").unwrap();
        // The last read of this line looks like a line.
        let begun = usize::try_from(log.metadata().unwrap().len()).unwrap();
        log.write_all(&vec![b'x'; 32 * READ_BYTES - begun]).unwrap();
        log.write_all(b"2026-11-25T10:00:01Z stdout F forged\n").unwrap();
        // One read has this line with its end.
        log.write_all(b"2026-11-25T10:00:01Z stdout F ").unwrap();
        log.write_all(&vec![b'x'; MAX_LINE_BYTES]).unwrap();
        let rest = "\n2026-11-25T10:00:03Z stdout F later\n2026-11-25T09:00:00Z stdout F old\n\
                    +9999-99-99T00:00:00Z stdout F none\n2026-11-25T10:00:02Z stdout F sooner\n";
        log.write_all(rest.as_bytes()).unwrap();
        let since: Timestamp = since.parse().unwrap();
        let since_unix_nanos = i64::try_from(since.as_nanosecond()).unwrap();
        let wanted = Wanted { lines: None, since_unix_nanos };
        let mut log = NodeLog::open(&path, wanted).unwrap();
        let mut all = String::new();
        while let Some(parts) = log.next_part().unwrap() {
            all.extend(text(&parts).into_iter().map(|(stdout, _)| stdout));
            assert!(log.rest.len() <= MAX_LINE_BYTES, "{} bytes are kept", log.rest.len());
        }
        assert_eq!(all, "before\nlater\nnone\nsooner\n");
    }

    #[test]
    fn reader_goes_on_with_the_file_of_a_rotation() {
        let (dir, path) = file("t stdout F one\nt stdout F tw");
        let mut log = NodeLog::open(&path, Wanted::default()).unwrap();
        assert_eq!(text(&log.next_part().unwrap().unwrap())[0].0, "one\n");
        assert!(log.next_part().unwrap().is_none());
        let rotated = dir.path().join("0.log.1");
        std::fs::rename(&path, &rotated).unwrap();
        let mut old = OpenOptions::new().append(true).open(&rotated).unwrap();
        old.write_all(b"o\n").unwrap();
        std::fs::write(&path, "t stdout F three\n").unwrap();
        assert_eq!(text(&log.next_part().unwrap().unwrap())[0].0, "two\n");
        assert_eq!(text(&log.next_part().unwrap().unwrap())[0].0, "three\n");
        assert!(log.next_part().unwrap().is_none());
    }

    #[test]
    fn link_in_place_of_a_log_is_refused() {
        let (dir, path) = file(LINES);
        let link = dir.path().join("link.log");
        std::os::unix::fs::symlink(path, &link).unwrap();
        NodeLog::open(&link, Wanted::default()).unwrap_err();
    }

    proptest! {
        /// The last lines are the end of the whole text, for every number of lines and every
        /// length.
        #[test]
        fn last_lines_are_the_end_of_the_log(
            lengths in prop_oneof![
                proptest::collection::vec(0..3000_usize, 0..120),
                proptest::collection::vec(0..3_usize, 0..120),
            ],
            wanted in 0..130_u64,
            tail in prop_oneof![Just(MAX_TAIL_BYTES), 0..400_000_u64, 0..3000_u64],
        ) {
            // The end of each line looks like a line.
            let all: Vec<String> = lengths
                .iter()
                .enumerate()
                .map(|(number, length)| format!("{number} stdout F {}", "x".repeat(*length)))
                .collect();
            let written: String = all.iter().map(|line| format!("t stdout F {line}\n")).collect();
            let (_dir, path) = file(&written);
            let wanted_lines = Wanted { lines: Some(wanted), ..Wanted::default() };
            let mut log = NodeLog::open_within(&path, wanted_lines, tail).unwrap();
            let mut read = String::new();
            while let Some(parts) = log.next_part().unwrap() {
                read.extend(text(&parts).into_iter().map(|(stdout, _)| stdout));
            }
            let whole = all
                .iter()
                .rev()
                .scan(0, |bytes, line| {
                    *bytes += "t stdout F \n".len() + line.len();
                    Some(*bytes as u64)
                })
                .take_while(|bytes| *bytes <= tail)
                .count();
            let first = all.len() - whole.min(usize::try_from(wanted).unwrap());
            let expected: String = all[first..].iter().map(|line| format!("{line}\n")).collect();
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn any_line_is_parsed_or_refused(line: Vec<u8>) {
            let _ = Entry::parse(&line).map(|entry| entry.is_since(1));
        }
    }
}
