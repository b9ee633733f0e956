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
    reader: Reader<&'a [u8]>,
}

impl<'a> CsvRows<'a> {
    /// Reads the rows of a text.
    pub fn new(text: &'a [u8]) -> Self {
        Self { reader: ReaderBuilder::new().trim(Trim::All).from_reader(text) }
    }

    /// Returns the header; empty if it can't be read.
    pub fn header(&mut self) -> StringRecord {
        self.reader.headers().cloned().unwrap_or_default()
    }

    /// Reads each row, by a function of its line and its values.
    pub fn read<T>(
        &mut self,
        mut read: impl FnMut(u64, &StringRecord) -> Result<T, String>,
    ) -> impl Iterator<Item = Result<T, WrongRow>> {
        let line_of = |position: Option<&Position>| position.map_or(0, Position::line);
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
