//! Fields of `/proc/<pid>/stat` (proc(5), which counts them from 1).

use std::str::SplitAsciiWhitespace;

/// Index of the process's start time among the [`fields`], in clock ticks since boot.
pub const START_TIME: usize = 22 - 3;

/// Returns the fields of the line after the program's name, from the third field on. The name is in
/// parentheses and may contain any byte, including parentheses.
pub fn fields(line: &[u8]) -> Option<SplitAsciiWhitespace<'_>> {
    let end = line.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(line.get(end + 1..)?).ok()?;
    Some(rest.split_ascii_whitespace())
}
