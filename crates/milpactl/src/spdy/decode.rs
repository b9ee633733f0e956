//! Frames of a server. Pure; accepts any bytes.

use bytes::{Buf, Bytes, BytesMut};

use super::{CONTROL, FLAG_FIN, HEAD_BYTES, kind};

/// Longest payload of a control frame, in bytes. Data frames of any length are passed on in parts.
pub const MAX_CONTROL_BYTES: usize = 64 << 10;

/// Frame of a server. Frames without a meaning for a client of these servers are skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A stream was accepted, or has further headers; they are not decompressed.
    Headers {
        /// The stream.
        stream: u32,
        /// The server's half is closed.
        end: bool,
    },
    /// A part of a data frame.
    Data {
        /// The stream.
        stream: u32,
        /// The bytes; empty only with the end.
        bytes: Bytes,
        /// The server's half is closed.
        end: bool,
    },
    /// Both halves of a stream are closed.
    Reset {
        /// The stream.
        stream: u32,
        /// The status, such as 3 for a refused stream.
        status: u32,
    },
    /// A ping of the server, or its answer to a ping of the client.
    Ping(u32),
    /// The server accepts no further streams.
    GoAway,
}

/// Error of decoding a frame. The connection can't be used any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The version is not 3.
    #[error("a frame of SPDY version {0}; allowed: 3")]
    Version(u16),
    /// A control frame is too long.
    #[error("a control frame of {0} bytes; allowed: {MAX_CONTROL_BYTES}")]
    TooLong(usize),
    /// A control frame is shorter than its fields.
    #[error("a control frame of type {kind} with {bytes} bytes; allowed: {least} or more")]
    TooShort {
        /// The type of the frame.
        kind: u16,
        /// The bytes that it has.
        bytes: usize,
        /// The bytes that its fields need.
        least: usize,
    },
    /// The server opens a stream, which no protocol of CRI does.
    #[error("the server opened the stream {0}; allowed: streams of the client")]
    ServerStream(u32),
}

/// Decodes frames from bytes that arrive in any parts.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The data frame whose payload is read.
    data: Option<Payload>,
}

#[derive(Debug, Clone, Copy)]
struct Payload {
    stream: u32,
    left: usize,
    end: bool,
}

impl Decoder {
    /// Returns the next frame, and removes its bytes; `None` if more bytes are needed. Then at most
    /// a head and [`MAX_CONTROL_BYTES`] remain.
    ///
    /// # Errors
    /// A violation of the protocol.
    pub fn next(&mut self, bytes: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(payload) = self.data {
                return Ok(self.payload(payload, bytes));
            }
            let Some(&[a, b, c, d, flags, length @ ..]) = bytes.first_chunk::<HEAD_BYTES>() else {
                return Ok(None);
            };
            let length = usize::from(length[0]) << 16
                | usize::from(u16::from_be_bytes([length[1], length[2]]));
            let end = flags & FLAG_FIN != 0;
            if a & 0x80 == 0 {
                bytes.advance(HEAD_BYTES);
                let stream = u32::from_be_bytes([a, b, c, d]);
                // An empty frame that ends nothing has no meaning.
                if length > 0 || end {
                    self.data = Some(Payload { stream, left: length, end });
                }
                continue;
            }
            let version = u16::from_be_bytes([a, b]);
            if version != CONTROL {
                return Err(FrameError::Version(version & 0x7fff));
            }
            if length > MAX_CONTROL_BYTES {
                return Err(FrameError::TooLong(length));
            }
            if bytes.len() < HEAD_BYTES + length {
                return Ok(None);
            }
            bytes.advance(HEAD_BYTES);
            let payload = bytes.split_to(length);
            if let Some(frame) = control(u16::from_be_bytes([c, d]), end, &payload)? {
                return Ok(Some(frame));
            }
        }
    }

    fn payload(&mut self, payload: Payload, bytes: &mut BytesMut) -> Option<Frame> {
        let Payload { stream, left, end } = payload;
        let part = bytes.split_to(bytes.len().min(left)).freeze();
        let left = left - part.len();
        if part.is_empty() && left > 0 {
            return None;
        }
        self.data = (left > 0).then_some(Payload { left, ..payload });
        Some(Frame::Data { stream, bytes: part, end: end && left == 0 })
    }
}

/// Decodes a control frame; `None` for a frame without a meaning here.
fn control(kind: u16, end: bool, payload: &[u8]) -> Result<Option<Frame>, FrameError> {
    let word = |at: usize| {
        let word = payload.get(at..).and_then(|rest| rest.first_chunk());
        let too_short = FrameError::TooShort { kind, bytes: payload.len(), least: at + 4 };
        word.map(|word| u32::from_be_bytes(*word)).ok_or(too_short)
    };
    let stream = || word(0).map(|stream| stream & 0x7fff_ffff);
    Ok(Some(match kind {
        kind::SYN_STREAM => return Err(FrameError::ServerStream(stream()?)),
        kind::SYN_REPLY | kind::HEADERS => Frame::Headers { stream: stream()?, end },
        kind::RST_STREAM => Frame::Reset { stream: stream()?, status: word(4)? },
        kind::PING => Frame::Ping(word(0)?),
        kind::GOAWAY => Frame::GoAway,
        // SETTINGS and WINDOW_UPDATE, which spdystream ignores too, and unknown types.
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spdy::encode;

    /// Decodes bytes that arrive in parts of these sizes. Joins the parts of data.
    fn decoded(all: &[u8], sizes: &[usize]) -> (Vec<Frame>, Option<FrameError>) {
        let (mut decoder, mut buffer, mut frames) = (Decoder::default(), BytesMut::new(), vec![]);
        let mut rest = all;
        let mut sizes = sizes.iter().copied().cycle();
        while !rest.is_empty() {
            let (part, later) = rest.split_at(sizes.next().unwrap_or(1).clamp(1, rest.len()));
            rest = later;
            buffer.extend_from_slice(part);
            loop {
                match decoder.next(&mut buffer) {
                    Ok(Some(frame)) => join(&mut frames, frame),
                    Ok(None) => break,
                    Err(error) => return (frames, Some(error)),
                }
            }
            assert!(buffer.len() < HEAD_BYTES + MAX_CONTROL_BYTES);
        }
        (frames, None)
    }

    fn join(frames: &mut Vec<Frame>, frame: Frame) {
        if let (
            Some(Frame::Data { stream, bytes, end: end @ false }),
            Frame::Data { stream: of, bytes: more, end: ends },
        ) = (frames.last_mut(), &frame)
            && stream == of
        {
            *bytes = [bytes.as_ref(), more.as_ref()].concat().into();
            *end = *ends;
            return;
        }
        frames.push(frame);
    }

    fn any_frame() -> impl Strategy<Value = (Vec<u8>, Option<Frame>)> {
        let stream = 1u32..0x7fff_ffff;
        let data = (stream.clone(), prop::collection::vec(any::<u8>(), 0..200), any::<bool>());
        let data = data.prop_map(|(stream, bytes, end)| {
            let mut bytes = Bytes::from(bytes);
            let frame = Frame::Data { stream, bytes: bytes.clone(), end };
            let is_empty = bytes.is_empty() && !end;
            (encode::data(stream, &mut bytes, end).to_vec(), (!is_empty).then_some(frame))
        });
        let reset = stream.clone().prop_map(|stream| {
            let frame = Frame::Reset { stream, status: 5 };
            (encode::reset(stream).to_vec(), Some(frame))
        });
        let ping = any::<u32>().prop_map(|id| (encode::ping(id).to_vec(), Some(Frame::Ping(id))));
        let headers = (stream, any::<bool>(), prop::collection::vec(any::<u8>(), 0..50));
        let headers = headers.prop_map(|(stream, end, block)| {
            let length = u8::try_from(4 + block.len()).unwrap();
            let head = [0x80, 3, 0, 2, u8::from(end), 0, 0, length];
            let bytes = [&head[..], &stream.to_be_bytes(), &block].concat();
            (bytes, Some(Frame::Headers { stream, end }))
        });
        let settings = Just((b"\x80\x03\0\x04\0\0\0\x04\0\0\0\0".to_vec(), None));
        let go_away = Just((b"\x80\x03\0\x07\0\0\0\0".to_vec(), Some(Frame::GoAway)));
        prop_oneof![data, reset, ping, headers, settings, go_away]
    }

    proptest! {
        #[test]
        fn frames_decode_the_same_in_any_parts(
            frames in prop::collection::vec(any_frame(), 0..20),
            sizes in prop::collection::vec(1usize..40, 1..5),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
            let mut expected = Vec::new();
            for frame in frames.into_iter().filter_map(|(_, frame)| frame) {
                join(&mut expected, frame);
            }
            prop_assert_eq!(decoded(&bytes, &sizes), (expected, None));
        }

        #[test]
        fn any_bytes_decode_the_same_in_any_parts(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            sizes in prop::collection::vec(1usize..40, 1..5),
        ) {
            prop_assert_eq!(decoded(&bytes, &sizes), decoded(&bytes, &[usize::MAX]));
        }
    }

    #[test]
    fn violations_are_refused_before_their_payload_arrives() {
        for (bytes, error) in [
            (&b"\x80\x02\0\x01\0\0\0\0"[..], FrameError::Version(2)),
            (b"\x80\x03\0\x04\0\x01\0\x01", FrameError::TooLong(65_537)),
            (
                b"\x80\x03\0\x03\0\0\0\x04\0\0\0\x01",
                FrameError::TooShort { kind: 3, bytes: 4, least: 8 },
            ),
            (b"\x80\x03\0\x01\0\0\0\x04\0\0\0\x02", FrameError::ServerStream(2)),
        ] {
            assert_eq!(decoded(bytes, &[1]).1, Some(error), "{bytes:?}");
        }
    }
}
