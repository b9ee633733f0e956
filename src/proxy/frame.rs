//! The frame of a gRPC message: a flag, and the length as four bytes.

use bytes::{BufMut, Bytes, BytesMut};

use crate::backends::cri::MAX_MESSAGE_BYTES;

/// Length of the frame's head.
pub(super) const HEADER_BYTES: usize = 5;

/// What a body of one message begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// A whole message, of this many bytes, and perhaps more after it.
    Complete {
        /// Length of the message without the head.
        length: usize,
        /// Whether the message is compressed.
        compressed: bool,
    },
    /// Not yet a whole message.
    Partial,
    /// The head of a message that is larger than [`MAX_MESSAGE_BYTES`].
    TooLarge(usize),
}

/// Looks at the first bytes of a body.
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

/// The head of an uncompressed message.
pub(super) fn header(length: usize) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

/// Messages up to this size are copied behind their head, larger ones sent as two parts. Bytes.
const MAX_COPIED_BYTES: usize = 16 << 10;

/// A message with its head, in one part or two.
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
    fn sizes() {
        assert_eq!(parse(&[]), Frame::Partial);
        assert_eq!(parse(&[0, 0, 0, 0, 0]), Frame::Complete { length: 0, compressed: false });
        assert_eq!(parse(&[1, 0, 0, 0, 1, 7, 8]), Frame::Complete { length: 1, compressed: true });
        assert_eq!(parse(&[0, 1, 0, 0, 0]), Frame::Partial);
        assert_eq!(parse(&[0, 1, 0, 0, 1]), Frame::TooLarge(MAX_MESSAGE_BYTES + 1));
    }

    proptest! {
        #[test]
        fn what_is_framed_is_whole(length in 0_usize..40_000) {
            let body = encode(vec![3; length].into()).concat();
            prop_assert_eq!(parse(&body), Frame::Complete { length, compressed: false });
            prop_assert_eq!(body.len(), HEADER_BYTES + length);
        }
    }
}
