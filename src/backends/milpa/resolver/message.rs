//! The flags and codes of DNS message headers (RFC 1035, 4.1.1). Pure.

use bytes::{Bytes, BytesMut};
use kiyot_link::resolver::DNS_HEADER_BYTES;

/// Flags QR and TC, in the third byte of a message.
const FLAG_QR: u8 = 0x80;
const FLAG_TC: u8 = 0x02;
/// Mask of RCODE in the fourth byte, and its value for a server failure.
const RCODE_MASK: u8 = 0x0f;
const RCODE_SERVER_FAILURE: u8 = 2;

/// Returns whether a message is the response to a query, by its id.
pub(super) fn answers(message: &[u8], query: &[u8]) -> bool {
    message.len() >= DNS_HEADER_BYTES && message[..2] == query[..2] && message[2] & FLAG_QR != 0
}

/// Returns the response for a failed name server. A resolver then queries the next name server at
/// once.
pub(super) fn failed(query: &[u8]) -> Bytes {
    answer(query, 0, RCODE_SERVER_FAILURE)
}

/// Returns the response for an answer beyond UDP's limit. A resolver then queries by TCP.
pub(super) fn truncated(query: &[u8]) -> Bytes {
    answer(query, FLAG_TC, 0)
}

/// Returns the query as a response without records.
fn answer(query: &[u8], flags: u8, how: u8) -> Bytes {
    let mut answer = BytesMut::from(query);
    if let Some([third, fourth]) =
        answer.get_mut(2..4).and_then(|bytes| <&mut [u8; 2]>::try_from(bytes).ok())
    {
        *third |= FLAG_QR | flags;
        *fourth = *fourth & !RCODE_MASK | how;
    }
    answer.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn synthesized_response_matches_the_query(
            query in prop::collection::vec(any::<u8>(), DNS_HEADER_BYTES..64)
        ) {
            for said in [failed(&query), truncated(&query)] {
                prop_assert!(answers(&said, &query));
                prop_assert_eq!(&said[4..], &query[4..]);
            }
            prop_assert_eq!(failed(&query)[3] & RCODE_MASK, RCODE_SERVER_FAILURE);
            prop_assert!(truncated(&query)[2] & FLAG_TC != 0);
            prop_assert!(truncated(&query)[3] & RCODE_MASK == 0);
        }

        #[test]
        fn unrelated_message_is_not_a_response(
            query in prop::collection::vec(any::<u8>(), DNS_HEADER_BYTES..64),
            at in 0..2_usize,
            with in 1..=255_u8
        ) {
            let mut other = failed(&query).to_vec();
            other[at] ^= with;
            prop_assert!(!answers(&other, &query));
            prop_assert!(!answers(&failed(&query)[..DNS_HEADER_BYTES - 1], &query));
            let mut query_again = query.clone();
            query_again[2] &= !FLAG_QR;
            prop_assert!(!answers(&query_again, &query));
        }
    }
}
