//! Input of a bounded size.

use std::{
    fs::File,
    io::{self, Read, Take},
    path::Path,
};

/// Limits an input to one byte more than its parser accepts: the parser reports an excess.
pub(super) fn bounded<R: Read>(input: R, max_bytes: usize) -> Take<R> {
    input.take(max_bytes as u64 + 1)
}

/// Reads a file up to one byte more than its parser accepts.
pub(super) fn read_file(path: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    bounded(File::open(path)?, max_bytes).read_to_end(&mut text)?;
    Ok(text)
}
