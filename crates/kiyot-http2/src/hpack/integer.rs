//! Integers with a prefix (RFC 7541, 5.1).

use crate::{Reason, error::Violation};

/// Largest integer that has a meaning in a header block.
const MAX_INTEGER: usize = 1 << 24;

/// Removes an integer with a prefix of `bits` bits from the front.
pub(super) fn decode(block: &mut &[u8], bits: u32) -> Result<usize, Violation> {
    let cut = Violation(Reason::COMPRESSION_ERROR, "HPACK integer is truncated");
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
                    "HPACK integer has too many bytes",
                ));
            }
        }
        if number > MAX_INTEGER {
            return Err(Violation(Reason::COMPRESSION_ERROR, "HPACK integer is too large"));
        }
    }
    *block = rest;
    Ok(number)
}

/// Appends an integer after the bits set in `first`.
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
        fn integer_round_trips(number in 0..=MAX_INTEGER, bits in 4_u32..=7) {
            let mut bytes = Vec::new();
            encode(&mut bytes, 0x80, bits, number);
            bytes.push(9);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(decode(&mut rest, bits), Ok(number));
            prop_assert_eq!(rest, [9]);
            prop_assert!(decode(&mut &bytes[..bytes.len() - 2], bits).is_err());
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>, bits in 4_u32..=7) {
            if let Ok(number) = decode(&mut bytes.as_slice(), bits) {
                prop_assert!(number <= MAX_INTEGER);
            }
        }
    }
}
