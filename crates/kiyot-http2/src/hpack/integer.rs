//! Numbers with a prefix of some bits (RFC 7541, 5.1).

use crate::{Reason, error::Violation};

/// No number in a header block means anything beyond this.
const MAX_INTEGER: usize = 1 << 24;

/// Takes the number off the front, whose first byte has `bits` bits of it.
pub(super) fn decode(block: &mut &[u8], bits: u32) -> Result<usize, Violation> {
    let cut = Violation(Reason::COMPRESSION_ERROR, "a header block ends within a number");
    let (&first, mut rest) = block.split_first().ok_or(cut)?;
    let prefix = (1 << bits) - 1;
    let mut number = usize::from(first) & prefix;
    if number == prefix {
        let mut shift = 0;
        loop {
            let (&byte, tail) = rest.split_first().ok_or(cut)?;
            rest = tail;
            number += usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
            if shift > 21 {
                return Err(Violation(
                    Reason::COMPRESSION_ERROR,
                    "a number in a header block has too many bytes",
                ));
            }
        }
        if number > MAX_INTEGER {
            return Err(Violation(
                Reason::COMPRESSION_ERROR,
                "a number in a header block is too large",
            ));
        }
    }
    *block = rest;
    Ok(number)
}

/// Writes a number behind the bits that `first` has set.
pub(super) fn encode(out: &mut Vec<u8>, first: u8, bits: u32, mut number: usize) {
    let prefix = (1 << bits) - 1;
    if number < prefix {
        return out.push(first | number as u8);
    }
    out.push(first | prefix as u8);
    number -= prefix;
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_read_as_it_was_written(number in 0..=MAX_INTEGER, bits in 4_u32..=7) {
            let mut bytes = Vec::new();
            encode(&mut bytes, 0x80, bits, number);
            bytes.push(9);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(decode(&mut rest, bits), Ok(number));
            prop_assert_eq!(rest, [9]);
            prop_assert!(decode(&mut &bytes[..bytes.len() - 2], bits).is_err());
        }

        #[test]
        fn no_bytes_are_too_odd(bytes: Vec<u8>, bits in 4_u32..=7) {
            if let Ok(number) = decode(&mut bytes.as_slice(), bits) {
                prop_assert!(number <= MAX_INTEGER);
            }
        }
    }
}
