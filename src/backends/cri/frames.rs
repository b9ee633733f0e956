//! Follows the boundaries of HTTP/2 frames in a byte stream, to tell a quiet peer from one that stopped in the middle.

const HEAD: usize = 9;
const HEADERS: u8 = 1;
const PUSH_PROMISE: u8 = 5;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Length of the connection preface that a client sends (RFC 9113, 3.4).
pub(super) const PREFACE: usize = 24;

/// Where in its frames a stream of bytes is.
#[derive(Debug)]
pub(super) struct Frames {
    head: [u8; HEAD],
    have: usize,
    left: usize,
    in_block: bool,
    ended: u64,
}

impl Frames {
    /// Of a stream that begins with `skip` bytes that are no frame.
    pub(super) fn after(skip: usize) -> Self {
        Self { head: [0; HEAD], have: 0, left: skip, in_block: false, ended: 0 }
    }

    /// Follows more bytes.
    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let skip = self.left.min(bytes.len());
                self.left -= skip;
                bytes = &bytes[skip..];
                self.ended += u64::from(self.left == 0);
                continue;
            }
            let take = (HEAD - self.have).min(bytes.len());
            self.head[self.have..self.have + take].copy_from_slice(&bytes[..take]);
            self.have += take;
            bytes = &bytes[take..];
            if self.have == HEAD {
                self.have = 0;
                let [a, b, c, kind, flags, ..] = self.head;
                self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                if matches!(kind, HEADERS | PUSH_PROMISE | CONTINUATION) {
                    self.in_block = flags & END_HEADERS == 0;
                }
                self.ended += u64::from(self.left == 0);
            }
        }
    }

    /// How many frames came whole; what was skipped at the beginning counts as one.
    pub(super) fn ended(&self) -> u64 {
        self.ended
    }

    /// Whether the last frame, and the last header block, came whole.
    pub(super) fn is_between(&self) -> bool {
        self.have == 0 && self.left == 0 && !self.in_block
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let mut bytes = vec![0, (length >> 8) as u8, length as u8, kind, flags, 0, 0, 0, 1];
        bytes.resize(HEAD + length, 0xab);
        bytes
    }

    #[test]
    fn a_header_block_ends_with_its_last_continuation() {
        let mut frames = Frames::after(0);
        frames.push(&frame(HEADERS, 0, 3));
        assert!(!frames.is_between());
        frames.push(&frame(CONTINUATION, END_HEADERS, 0));
        assert!(frames.is_between());
        assert_eq!(frames.ended(), 2);
    }

    #[test]
    fn the_preface_counts_as_one() {
        let mut frames = Frames::after(PREFACE);
        assert!(!frames.is_between());
        frames.push(&[b'x'; PREFACE]);
        assert!(frames.is_between());
        assert_eq!(frames.ended(), 1);
    }

    proptest! {
        #[test]
        fn parts_make_no_difference(lengths in proptest::collection::vec(0_usize..600, 0..8), cuts in proptest::collection::vec(1_usize..50, 1..20)) {
            let bytes: Vec<u8> = lengths.iter().flat_map(|&length| frame(0, 0, length)).collect();
            let mut frames = Frames::after(0);
            let (mut rest, mut cuts) = (bytes.as_slice(), cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                frames.push(head);
                rest = tail;
            }
            prop_assert!(frames.is_between());
            prop_assert_eq!(frames.ended(), lengths.len() as u64);
            frames.push(&[0; 4]);
            prop_assert!(!frames.is_between());
        }
    }
}
