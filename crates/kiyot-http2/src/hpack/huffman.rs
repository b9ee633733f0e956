//! Huffman decoder (RFC 7541, appendix B). The code is canonical: the lengths define it. The
//! encoder writes plain strings.

use crate::{Reason, error::Violation};

/// Code lengths in bits, by byte.
#[rustfmt::skip]
const LENGTHS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];

/// Bits of the longest code.
const MAX_CODE_BITS: usize = 30;
/// Bits of the codes that one table lookup decodes.
const SHORT_CODE_BITS: usize = 8;

/// Decoding tables: bytes in the order of their codes; for each length, the first code and the
/// index of its byte; for each prefix of eight bits, the byte and the length of its code.
struct Code {
    order: [u8; 256],
    first: [u32; MAX_CODE_BITS + 2],
    begin: [usize; MAX_CODE_BITS + 2],
    short: [Option<(u8, u8)>; 1 << SHORT_CODE_BITS],
}

static CODE: Code = code();

const fn code() -> Code {
    let mut code = Code {
        order: [0; 256],
        first: [0; MAX_CODE_BITS + 2],
        begin: [0; MAX_CODE_BITS + 2],
        short: [None; 1 << SHORT_CODE_BITS],
    };
    let (mut length, mut next, mut at) = (1, 0_u32, 0);
    while length <= MAX_CODE_BITS {
        next <<= 1;
        code.first[length] = next;
        code.begin[length] = at;
        let mut byte = 0;
        while byte < 256 {
            if LENGTHS[byte] as usize == length {
                code.order[at] = byte as u8;
                if length <= SHORT_CODE_BITS {
                    let mut fill = 0;
                    while fill < 1 << (SHORT_CODE_BITS - length) {
                        code.short[(next as usize) << (SHORT_CODE_BITS - length) | fill] =
                            Some((byte as u8, length as u8));
                        fill += 1;
                    }
                }
                next += 1;
                at += 1;
            }
            byte += 1;
        }
        length += 1;
    }
    code.begin[MAX_CODE_BITS + 1] = at;
    code
}

/// Returns the byte whose code begins a window of 32 bits, and the length of the code; `None` for
/// EOS, which is all ones.
fn lookup(window: u32) -> Option<(u8, u32)> {
    if let Some((byte, length)) = CODE.short[(window >> (32 - SHORT_CODE_BITS)) as usize] {
        return Some((byte, u32::from(length)));
    }
    (SHORT_CODE_BITS + 1..=MAX_CODE_BITS).find_map(|length| {
        let offset = (window >> (32 - length)).checked_sub(CODE.first[length])? as usize;
        let at = CODE.begin[length] + offset;
        (at < CODE.begin[length + 1]).then(|| (CODE.order[at], length as u32))
    })
}

/// Appends the decoded bytes: at most 8/5 of the encoded bytes.
pub(super) fn decode(mut encoded: &[u8], out: &mut Vec<u8>) -> Result<(), Violation> {
    let bad = Violation(Reason::COMPRESSION_ERROR, "HPACK string is no Huffman code");
    let (mut bits, mut have) = (0_u64, 0_u32);
    loop {
        while have <= 32
            && let Some((&byte, rest)) = encoded.split_first()
        {
            (bits, have, encoded) = (bits << 8 | u64::from(byte), have + 8, rest);
        }
        if have == 0 {
            return Ok(());
        }
        // Missing bits are ones, as in the padding.
        let window = if have >= 32 {
            (bits >> (have - 32)) as u32
        } else {
            (bits << (32 - have)) as u32 | u32::MAX >> have
        };
        match lookup(window) {
            Some((byte, length)) if length <= have => {
                out.push(byte);
                have -= length;
            }
            // Padding: fewer than eight bits, all ones.
            _ if have < 8 && bits.trailing_ones() >= have => return Ok(()),
            _ => return Err(bad),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(bytes: &[u8]) -> Vec<u8> {
        let mut bits = String::new();
        for &byte in bytes {
            let at = CODE.order.iter().position(|&other| other == byte).unwrap();
            let length = usize::from(LENGTHS[usize::from(byte)]);
            let code = CODE.first[length] as usize + at - CODE.begin[length];
            bits.push_str(&format!("{code:0length$b}"));
        }
        while !bits.len().is_multiple_of(8) {
            bits.push('1');
        }
        bits.as_bytes()
            .chunks(8)
            .map(|byte| u8::from_str_radix(std::str::from_utf8(byte).unwrap(), 2).unwrap())
            .collect()
    }

    #[test]
    fn rfc_examples_match() {
        // RFC 7541, C.4.1 and C.6.1
        assert_eq!(
            encode(b"www.example.com"),
            [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff]
        );
        assert_eq!(encode(b"private"), [0xae, 0xc3, 0x77, 0x1a, 0x4b]);
        // The codes of 0 and 22; all codes but EOS are used (appendix B).
        assert_eq!(encode(&[0]), [0xff, 0xc7]);
        assert_eq!(encode(&[22]), [0xff, 0xff, 0xff, 0xfb]);
        assert_eq!(CODE.begin[MAX_CODE_BITS + 1], 256);
    }

    #[test]
    fn malformed_huffman_code_is_an_error() {
        for bad in [&[0xff][..], &[0xff; 4], &[0xff; 5], &[0x00], &encode(b"a")[..0], &[0x1f, 0xff]]
        {
            assert_eq!(decode(bad, &mut Vec::new()).is_err(), !bad.is_empty(), "{bad:x?}");
        }
    }

    proptest! {
        #[test]
        fn huffman_code_round_trips(bytes: Vec<u8>) {
            let mut out = Vec::new();
            decode(&encode(&bytes), &mut out).unwrap();
            prop_assert_eq!(out, bytes);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>) {
            let mut out = Vec::new();
            if decode(&bytes, &mut out).is_ok() {
                prop_assert_eq!(encode(&out), bytes);
            }
        }
    }
}
