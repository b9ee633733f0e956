//! The gRPC frame (length-prefixed message): a flag and four bytes of length, then the message.

use bytes::{BufMut, Bytes, BytesMut};

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

    proptest! {
        #[test]
        fn encoded_message_parses_as_a_complete_frame(length in 0_usize..40_000) {
            let body = encode(vec![3; length].into()).concat();
            prop_assert_eq!(parse(&body), Frame::Complete { length, compressed: false });
            prop_assert_eq!(body.len(), HEADER_BYTES + length);
        }
    }
}
