//! End of a response's body. Pure; accepts any bytes.

use super::head::Body;

/// Longest body that is forwarded, in bytes.
pub(super) const MAX_BODY_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(super) enum BodyRest {
    /// Remaining bytes.
    Length(u64),
    /// In chunks.
    Chunked(ChunkState),
    /// Until the connection ends, with the bytes that are still allowed.
    Close(u64),
}

/// Position in a chunked body.
#[derive(Debug, Default)]
pub(super) struct ChunkState {
    state: ChunkPart,
    taken: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ChunkPart {
    /// In the line with a chunk's size: the size so far, and whether its digits have ended.
    Size(u64, bool),
    /// In a chunk: the remaining bytes, including the line end.
    Data(u64),
    /// In the trailer lines: whether the current line has bytes.
    Trailer(bool),
    #[default]
    Start,
    End,
}

impl BodyRest {
    /// Returns the whole body that follows a head.
    pub(super) fn new(body: Body) -> Self {
        match body {
            Body::Length(length) => Self::Length(length.min(MAX_BODY_BYTES)),
            Body::Chunked => Self::Chunked(ChunkState::default()),
            Body::Close => Self::Close(MAX_BODY_BYTES),
        }
    }

    /// Returns whether the body is complete.
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::Length(left) | Self::Close(left) => *left == 0,
            Self::Chunked(chunks) => {
                chunks.state == ChunkPart::End || chunks.taken >= MAX_BODY_BYTES
            }
        }
    }

    /// Consumes the next bytes, and returns the part that belongs to the body.
    pub(super) fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Length(left) | Self::Close(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= taken as u64;
                &bytes[..taken]
            }
            Self::Chunked(chunks) => {
                let taken =
                    bytes.iter().position(|byte| !chunks.step(*byte)).unwrap_or(bytes.len());
                &bytes[..taken]
            }
        }
    }
}

impl ChunkState {
    /// Consumes a byte, and returns whether it belongs to the body. Invalid chunks end the body.
    fn step(&mut self, byte: u8) -> bool {
        if self.taken >= MAX_BODY_BYTES {
            return false;
        }
        let next = match (self.state, byte) {
            (ChunkPart::End, _) => return false,
            (ChunkPart::Start, byte) => match hex_digit(byte) {
                Some(digit) => ChunkPart::Size(digit, false),
                None => ChunkPart::End,
            },
            (ChunkPart::Size(0, _), b'\n') => ChunkPart::Trailer(false),
            (ChunkPart::Size(size, _), b'\n') => ChunkPart::Data(size.saturating_add(2)),
            (ChunkPart::Size(size, over), byte) => match hex_digit(byte).filter(|_| !over) {
                Some(digit) => {
                    ChunkPart::Size(size.saturating_mul(16).saturating_add(digit), false)
                }
                None => ChunkPart::Size(size, true),
            },
            (ChunkPart::Data(1), _) => ChunkPart::Start,
            (ChunkPart::Data(left), _) => ChunkPart::Data(left.saturating_sub(1)),
            (ChunkPart::Trailer(false), b'\n') => ChunkPart::End,
            (ChunkPart::Trailer(true), b'\n') => ChunkPart::Trailer(false),
            (ChunkPart::Trailer(any), byte) => ChunkPart::Trailer(any || byte != b'\r'),
        };
        self.state = next;
        self.taken += 1;
        true
    }
}

fn hex_digit(byte: u8) -> Option<u64> {
    char::from(byte).to_digit(16).map(u64::from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunked(bytes: &[u8]) -> (usize, bool) {
        let mut rest = BodyRest::new(Body::Chunked);
        let taken = rest.take(bytes).len();
        (taken, rest.is_complete())
    }

    #[test]
    fn chunked_body_ends_with_its_last_chunk() {
        assert_eq!(chunked(b"5\r\nhello\r\n0\r\n\r\nmore"), (15, true));
        assert_eq!(chunked(b"5;x=1\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n"), (31, true));
        assert_eq!(chunked(b"5\r\nhel"), (6, false));
        assert!(chunked(b"zz\r\n").1);
    }

    #[test]
    fn body_length_is_bounded() {
        let mut rest = BodyRest::new(Body::Length(u64::MAX));
        assert_eq!(rest.take(&vec![0; (MAX_BODY_BYTES + 1) as usize]).len() as u64, MAX_BODY_BYTES);
        assert!(rest.is_complete());
        assert!(BodyRest::new(Body::Length(0)).is_complete());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_in_pieces_do_not_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..200
        ) {
            let cut = cut.min(bytes.len());
            let mut rest = BodyRest::new(Body::Chunked);
            let first = rest.take(&bytes[..cut]).len();
            let second = if first == cut { rest.take(&bytes[cut..]).len() } else { 0 };
            prop_assert_eq!(first + second, chunked(&bytes).0);
        }
    }
}
