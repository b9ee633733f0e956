//! What little of DNS messages is looked at (RFC 1035, 4.1.1). Pure.

use bytes::{Bytes, BytesMut};
use kiyot_link::resolver::DNS_HEADER_BYTES;

/// In the third byte of a message: it is an answer; it was cut.
const IS_ANSWER: u8 = 0x80;
const IS_CUT: u8 = 0x02;
/// In the fourth byte: how it went, and "the server failed".
const HOW: u8 = 0x0f;
const FAILED: u8 = 2;

/// Whether a message answers a query: by its id.
pub(super) fn answers(message: &[u8], query: &[u8]) -> bool {
    message.len() >= DNS_HEADER_BYTES && message[..2] == query[..2] && message[2] & IS_ANSWER != 0
}

/// That the name server could not be asked: a resolver then asks the next one at once.
pub(super) fn failed(query: &[u8]) -> Bytes {
    answer(query, 0, FAILED)
}

/// That the answer is too large for UDP: a resolver then asks by TCP.
pub(super) fn cut(query: &[u8]) -> Bytes {
    answer(query, IS_CUT, 0)
}

/// The query itself, made an answer without records.
fn answer(query: &[u8], flags: u8, how: u8) -> Bytes {
    let mut answer = BytesMut::from(query);
    if let Some([third, fourth]) =
        answer.get_mut(2..4).and_then(|bytes| <&mut [u8; 2]>::try_from(bytes).ok())
    {
        *third |= IS_ANSWER | flags;
        *fourth = *fourth & !HOW | how;
    }
    answer.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_said_instead_answers_the_query(query in prop::collection::vec(any::<u8>(), DNS_HEADER_BYTES..64)) {
            for said in [failed(&query), cut(&query)] {
                prop_assert!(answers(&said, &query));
                prop_assert_eq!(&said[4..], &query[4..]);
            }
            prop_assert_eq!(failed(&query)[3] & HOW, FAILED);
            prop_assert!(cut(&query)[2] & IS_CUT != 0 && cut(&query)[3] & HOW == 0);
        }

        #[test]
        fn another_message_is_no_answer(query in prop::collection::vec(any::<u8>(), DNS_HEADER_BYTES..64), at in 0..2_usize, with in 1..=255_u8) {
            let mut other = failed(&query).to_vec();
            other[at] ^= with;
            prop_assert!(!answers(&other, &query));
            prop_assert!(!answers(&failed(&query)[..DNS_HEADER_BYTES - 1], &query));
            let mut query_again = query.clone();
            query_again[2] &= !IS_ANSWER;
            prop_assert!(!answers(&query_again, &query));
        }
    }
}
