//! Frames of a client. Pure.

use bytes::Bytes;

use super::{CONTROL, FLAG_FIN, HEAD_BYTES, kind};

/// Bytes of a data frame.
pub const MAX_DATA_BYTES: usize = 32 << 10;

/// Head of a zlib stream with SPDY/3's dictionary, which its Adler-32 names.
const ZLIB_HEAD: [u8; 6] = [0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2];
/// An empty stored block, which flushes the decompressor.
const ZLIB_FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];
/// The highest id of a stream.
const MAX_STREAM: u32 = 0x7fff_ffff;
/// The status CANCEL of a reset.
const CANCEL: u32 = 5;

/// Error of opening a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The headers don't fit in a stored block.
    #[error("headers of {0} bytes; allowed: {max}", max = u16::MAX)]
    LongHeaders(usize),
    /// All ids of streams were used.
    #[error("the connection has used all ids of streams; allowed: {MAX_STREAM}")]
    NoIds,
}

/// Encodes frames that open the streams of a connection. They must be sent in their order, because
/// their headers share a compression context.
#[derive(Debug)]
pub struct Encoder {
    next: u32,
}

impl Default for Encoder {
    fn default() -> Self {
        Self { next: 1 }
    }
}

impl Encoder {
    /// Opens a stream with headers such as `streamtype`. With `end`, closes our half at once.
    /// Returns the stream's id and the frame.
    ///
    /// # Errors
    /// Too long headers, or no id is left.
    pub fn open(
        &mut self,
        headers: &[(&str, &str)],
        end: bool,
    ) -> Result<(u32, Bytes), StreamError> {
        let stream = self.next;
        if stream > MAX_STREAM {
            return Err(StreamError::NoIds);
        }
        let mut block = length(headers.len()).to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            block.extend(length(text.len()).to_be_bytes());
            block.extend(text.as_bytes());
        }
        // All header blocks are a single zlib stream, of stored blocks.
        let stored =
            u16::try_from(block.len()).map_err(|_| StreamError::LongHeaders(block.len()))?;
        let mut payload = [stream.to_be_bytes().as_slice(), &[0; 6]].concat();
        payload.extend(ZLIB_HEAD.iter().filter(|_| stream == 1));
        payload.push(0);
        payload.extend([stored.to_le_bytes(), (!stored).to_le_bytes()].concat());
        payload.extend([block.as_slice(), &ZLIB_FLUSH].concat());
        self.next += 2;
        Ok((stream, control(kind::SYN_STREAM, flags(end), &payload)))
    }
}

/// Returns a data frame of at most [`MAX_DATA_BYTES`], and removes its bytes. With `end` the frame
/// of the last bytes half-closes the stream.
pub(crate) fn data(stream: u32, bytes: &mut Bytes, end: bool) -> Bytes {
    let part = bytes.split_to(bytes.len().min(MAX_DATA_BYTES));
    frame(stream.to_be_bytes(), flags(end && bytes.is_empty()), &part)
}

/// Returns a frame that resets a stream.
pub(crate) fn reset(stream: u32) -> Bytes {
    let payload = [stream.to_be_bytes(), CANCEL.to_be_bytes()].concat();
    control(kind::RST_STREAM, 0, &payload)
}

/// Returns a ping, or the answer to a ping.
pub(crate) fn ping(id: u32) -> Bytes {
    control(kind::PING, 0, &id.to_be_bytes())
}

fn flags(end: bool) -> u8 {
    if end { FLAG_FIN } else { 0 }
}

/// Returns a length in 24 bits. Callers bound it far below.
fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn control(kind: u16, flags: u8, payload: &[u8]) -> Bytes {
    let [a, b] = CONTROL.to_be_bytes();
    let [c, d] = kind.to_be_bytes();
    frame([a, b, c, d], flags, payload)
}

fn frame(head: [u8; 4], flags: u8, payload: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(HEAD_BYTES + payload.len());
    frame.extend(head);
    frame.push(flags);
    frame.extend(&length(payload.len()).to_be_bytes()[1..]);
    frame.extend(payload);
    frame.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_stream_begins_the_compression_and_later_streams_continue_it() {
        let mut encoder = Encoder::default();
        let (one, first) = encoder.open(&[("a", "bc")], false).unwrap();
        let (two, second) = encoder.open(&[("a", "bc")], true).unwrap();
        assert_eq!((one, two), (1, 3));
        let block = b"\0\x0f\0\xf0\xff\0\0\0\x01\0\0\0\x01a\0\0\0\x02bc\0\0\0\xff\xff";
        let block = [&block[..], &[]].concat();
        let first_head = b"\x80\x03\0\x01\0\0\0\x29\0\0\0\x01\0\0\0\0\0\0\x78\xbb\xe3\xc6\xa7\xc2";
        assert_eq!(first[..], [&first_head[..], &block].concat());
        let second_head = b"\x80\x03\0\x01\x01\0\0\x23\0\0\0\x03\0\0\0\0\0\0";
        assert_eq!(second[..], [&second_head[..], &block].concat());
    }

    #[test]
    fn too_long_headers_are_refused_and_use_no_id() {
        let mut encoder = Encoder::default();
        let long = "x".repeat(1 << 16);
        assert_eq!(
            encoder.open(&[("a", &long)], false).unwrap_err(),
            StreamError::LongHeaders((1 << 16) + 13)
        );
        assert_eq!(encoder.open(&[], false).unwrap().0, 1);
        encoder.next = MAX_STREAM + 2;
        assert_eq!(encoder.open(&[], false).unwrap_err(), StreamError::NoIds);
    }

    #[test]
    fn long_data_is_split_and_only_its_last_frame_ends_the_stream() {
        let mut bytes = Bytes::from(vec![7; MAX_DATA_BYTES + 1]);
        let first = data(5, &mut bytes, true);
        let second = data(5, &mut bytes, true);
        assert_eq!(first[..8], [0, 0, 0, 5, 0, 0, 0x80, 0]);
        assert_eq!(second[..], [0, 0, 0, 5, 1, 0, 0, 1, 7]);
        assert!(bytes.is_empty());
        assert_eq!(data(5, &mut bytes, true)[..], [0, 0, 0, 5, 1, 0, 0, 0]);
    }
}
