//! The frame of a gRPC message: a flag, and the length as four bytes.

use bytes::{BufMut, Bytes, BytesMut};

use crate::backends::cri::MAX_MESSAGE;

/// Length of the frame's head.
pub(super) const HEAD: usize = 5;

/// What a body of one message begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// A whole message, of this many bytes, and perhaps more after it.
    Whole {
        /// Length of the message without the head.
        length: usize,
        /// Whether the message is compressed.
        compressed: bool,
    },
    /// Not yet a whole message.
    Part,
    /// The head of a message that is larger than [`MAX_MESSAGE`].
    TooLarge(usize),
}

/// Looks at the first bytes of a body.
pub(super) fn look(body: &[u8]) -> Body {
    let Some((&[flag, a, b, c, d], rest)) = body.split_first_chunk::<HEAD>() else {
        return Body::Part;
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > MAX_MESSAGE {
        return Body::TooLarge(length);
    }
    if rest.len() < length { Body::Part } else { Body::Whole { length, compressed: flag != 0 } }
}

/// The head of an uncompressed message.
pub(super) fn head(length: usize) -> [u8; HEAD] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [0, a, b, c, d]
}

/// Messages up to this size are copied behind their head, larger ones sent as two parts. Bytes.
const COPIED: usize = 16 << 10;

/// A message with its head, in one part or two.
pub(super) fn framed(message: Bytes) -> Vec<Bytes> {
    let head = head(message.len());
    if message.len() > COPIED {
        return vec![Bytes::copy_from_slice(&head), message];
    }
    let mut whole = BytesMut::with_capacity(HEAD + message.len());
    whole.put_slice(&head);
    whole.put_slice(&message);
    vec![whole.freeze()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(look(&[]), Body::Part);
        assert_eq!(look(&[0, 0, 0, 0, 0]), Body::Whole { length: 0, compressed: false });
        assert_eq!(look(&[1, 0, 0, 0, 1, 7, 8]), Body::Whole { length: 1, compressed: true });
        assert_eq!(look(&[0, 1, 0, 0, 0]), Body::Part);
        assert_eq!(look(&[0, 1, 0, 0, 1]), Body::TooLarge(MAX_MESSAGE + 1));
    }

    proptest! {
        #[test]
        fn what_is_framed_is_whole(length in 0_usize..40_000) {
            let body = framed(vec![3; length].into()).concat();
            prop_assert_eq!(look(&body), Body::Whole { length, compressed: false });
            prop_assert_eq!(body.len(), HEAD + length);
        }
    }
}
