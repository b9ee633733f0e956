//! Rows of comma-separated values after a header, each with its line.

use std::fmt;

use csv::{Position, Reader, ReaderBuilder, StringRecord, Trim};

/// A row that can't be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongRow {
    /// The number of the line, from 1.
    pub line: u64,
    /// The reason, with the value and what is allowed.
    pub reason: String,
}

impl fmt::Display for WrongRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

/// A reader of rows.
#[derive(Debug)]
pub struct CsvRows<'a> {
    text: &'a [u8],
    reader: Reader<&'a [u8]>,
}

impl<'a> CsvRows<'a> {
    /// Reads the rows of a text.
    pub fn new(text: &'a [u8]) -> Self {
        Self { text, reader: ReaderBuilder::new().trim(Trim::All).from_reader(text) }
    }

    /// Returns the header; empty if it can't be read.
    pub fn header(&mut self) -> StringRecord {
        self.reader.headers().cloned().unwrap_or_default()
    }

    /// Reads each row with a function of its line and its values.
    pub fn read<T>(
        &mut self,
        mut read: impl FnMut(u64, &StringRecord) -> Result<T, String>,
    ) -> impl Iterator<Item = Result<T, WrongRow>> {
        let text = self.text;
        let line_of = move |position: Option<&Position>| position.map_or(0, |it| line(text, it));
        self.reader.records().map(move |record| match record {
            Ok(values) => {
                let line = line_of(values.position());
                read(line, &values).map_err(|reason| WrongRow { line, reason })
            }
            Err(error) => {
                Err(WrongRow { line: line_of(error.position()), reason: error.to_string() })
            }
        })
    }
}

/// Returns the line of a row. Its position is before the preceding blank lines.
fn line(text: &[u8], position: &Position) -> u64 {
    let begin = usize::try_from(position.byte()).unwrap_or(usize::MAX);
    let blank = text.iter().skip(begin).take_while(|byte| matches!(byte, b'\r' | b'\n'));
    position.line() + blank.map(|byte| u64::from(*byte == b'\n')).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_lines_and_trimmed_values() {
        let text = b"name , size\na, 1\n\n b ,two\nc\n\"d\ne\", 3\nf,4\n";
        let mut rows = CsvRows::new(text);
        assert_eq!(rows.header(), vec!["name", "size"]);
        let read = rows.read(|line, values| {
            let size: u32 = values[1].parse().map_err(|_| format!("size {:?}", &values[1]))?;
            Ok((line, values[0].to_owned(), size))
        });
        let (good, wrong): (Vec<_>, Vec<_>) = read.partition(Result::is_ok);
        let row = |line, name: &str, size| Ok((line, name.to_owned(), size));
        assert_eq!(good, [row(2, "a", 1), row(6, "d\ne", 3), row(8, "f", 4)]);
        let wrong: Vec<_> = wrong.into_iter().map(|row| row.unwrap_err().to_string()).collect();
        assert_eq!(wrong[0], "line 4: size \"two\"");
        assert!(wrong[1].starts_with("line 5: "), "a row with too few values: {}", wrong[1]);
        assert_eq!(wrong.len(), 2);
    }

    #[test]
    fn blank_lines_count_with_either_end() {
        let lines = |text: &str| {
            let mut rows = CsvRows::new(text.as_bytes());
            rows.read(|line, _| Ok(line)).collect::<Vec<_>>()
        };
        for text in ["\n\na\n1\n\n\n2\n3", "a\n\n\n1\n\n\n2\n3\n"] {
            let expected = [4, 7, 8].map(Ok);
            assert_eq!(lines(text), expected, "{text:?}");
            assert_eq!(lines(&text.replace('\n', "\r\n")), expected, "{text:?}");
        }
    }
}
