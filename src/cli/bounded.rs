//! Input of a bounded size.

use std::io::{Read, Take};

/// Limits an input to one byte more than its parser accepts: the parser reports an excess.
pub(super) fn bounded<R: Read>(input: R, max_bytes: usize) -> Take<R> {
    input.take(max_bytes as u64 + 1)
}
