//! The gRPC frame (length-prefixed message): a flag and four bytes of length, then the message.

use bytes::{BufMut, Bytes, BytesMut};

use super::peek::{self, LeadingField};
use crate::backends::cri::MAX_MESSAGE_BYTES;

/// Bytes of a frame's header.
pub(super) const HEADER_BYTES: usize = 5;

/// The first frame of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// A complete frame, perhaps with data after it.
    Complete {
        /// Bytes of the message without the header.
        length: usize,
        /// The message is compressed.
        compressed: bool,
    },
    /// An incomplete frame.
    Partial,
    /// A header of a message that is larger than [`MAX_MESSAGE_BYTES`].
    TooLarge(usize),
}

/// Parses the first frame of a body.
pub(super) fn parse(body: &[u8]) -> Frame {
    let Some((&[flag, a, b, c, d], rest)) = body.split_first_chunk::<HEADER_BYTES>() else {
        return Frame::Partial;
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Frame::TooLarge(length);
    }
    if rest.len() < length {
        Frame::Partial
    } else {
        Frame::Complete { length, compressed: flag != 0 }
    }
}

/// Reads the first field of a body's first message; [`LeadingField::Other`] if the message is
/// compressed.
pub(super) fn leading_field(body: &[u8]) -> LeadingField<'_> {
    match body.split_first_chunk::<HEADER_BYTES>() {
        None => LeadingField::Unknown,
        Some((&[0, a, b, c, d], known)) => {
            peek::leading_field(known, u32::from_be_bytes([a, b, c, d]) as usize)
        }
        Some(_) => LeadingField::Other,
    }
}

/// Returns the header of an uncompressed message.
pub(super) fn header(length: usize) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

/// Bound on the bytes of a message that is copied behind its header. Larger messages are sent as
/// two parts.
const MAX_COPIED_BYTES: usize = 16 << 10;

/// Returns the frame of a message, in one part or two.
pub(super) fn encode(message: Bytes) -> Vec<Bytes> {
    let header = header(message.len());
    if message.len() > MAX_COPIED_BYTES {
        return vec![Bytes::copy_from_slice(&header), message];
    }
    let mut whole = BytesMut::with_capacity(HEADER_BYTES + message.len());
    whole.put_slice(&header);
    whole.put_slice(&message);
    vec![whole.freeze()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_complete_partial_or_too_large_by_their_length() {
        assert_eq!(parse(&[]), Frame::Partial);
        assert_eq!(parse(&[0, 0, 0, 0, 0]), Frame::Complete { length: 0, compressed: false });
        assert_eq!(parse(&[1, 0, 0, 0, 1, 7, 8]), Frame::Complete { length: 1, compressed: true });
        assert_eq!(parse(&[0, 1, 0, 0, 0]), Frame::Partial);
        assert_eq!(parse(&[0, 1, 0, 0, 1]), Frame::TooLarge(MAX_MESSAGE_BYTES + 1));
    }

    #[test]
    fn leading_field_is_known_once_its_last_byte_is_received() {
        let body = encode(Bytes::from_static(b"\x0a\x04id-1\x12\x03abc")).concat();
        for end in 0..body.len() {
            let expected = if end < HEADER_BYTES + 6 {
                LeadingField::Unknown
            } else {
                LeadingField::Text("id-1")
            };
            assert_eq!(leading_field(&body[..end]), expected, "{end}");
        }
        let cases: [&[u8]; 8] = [
            b"",
            b"\x12\x01x",
            b"\x0a",
            b"\x0a\x02x",
            b"\x0a\x01\xff",
            b"\x0a\x80\x01",
            b"\x08\x01",
            b"\x8a\x00\x01x",
        ];
        for message in cases {
            let body = encode(Bytes::from_static(message)).concat();
            assert_eq!(leading_field(&body), LeadingField::Other, "{message:?}");
        }
        assert_eq!(leading_field(&[1, 0, 0, 0, 9]), LeadingField::Other, "compressed");
        // Bytes after the message do not belong to it.
        assert_eq!(leading_field(&[0, 0, 0, 0, 2, 0x0a, 1, b'x']), LeadingField::Other);
    }

    proptest! {
        #[test]
        fn encoded_message_parses_as_a_complete_frame(length in 0_usize..40_000) {
            let body = encode(vec![3; length].into()).concat();
            prop_assert_eq!(parse(&body), Frame::Complete { length, compressed: false });
            prop_assert_eq!(body.len(), HEADER_BYTES + length);
        }
    }
}
