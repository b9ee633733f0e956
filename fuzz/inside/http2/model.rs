//! The peer's view of this side.

use std::collections::HashMap;

use crate::{
    Reason,
    core::Core,
    frame::{self, Head, MAX_PAYLOAD_BYTES, PREFACE},
    hpack::Decoder,
};

/// Initial window of the connection. Bytes.
const INITIAL_WINDOW_BYTES: i64 = 65_535;

/// State of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    /// The peer has opened the stream.
    Open,
    /// The head is sent.
    HeadSent,
    Ended,
    Reset,
}

/// The peer's view of this side, and the windows that the peer has granted.
pub(super) struct Model {
    is_server: bool,
    decoder: Decoder,
    block: Option<Vec<u8>>,
    /// Last opened stream.
    last_id: u32,
    /// Window for data.
    window: i64,
    streams: HashMap<u32, Stream>,
    greeted: bool,
    /// Bytes of an incomplete frame.
    came: Vec<u8>,
}

impl Model {
    fn new(is_server: bool) -> Self {
        let (decoder, streams) = (Decoder::new(), HashMap::new());
        Self {
            is_server,
            decoder,
            block: None,
            last_id: 0,
            window: INITIAL_WINDOW_BYTES,
            streams,
            greeted: is_server,
            came: Vec::new(),
        }
    }

    pub(super) fn client() -> Self {
        Self::new(false)
    }

    pub(super) fn server() -> Self {
        Self::new(true)
    }

    /// Reads the whole output, which must end at a frame's end.
    pub(super) fn read_all(&mut self, core: &mut Core) {
        while !core.output().is_empty() {
            self.read_some(core, usize::MAX);
        }
        assert!(self.came.is_empty() && self.block.is_none(), "the output ends within a frame");
    }

    /// Reads at most `most` bytes of the output.
    pub(super) fn read_some(&mut self, core: &mut Core, most: usize) {
        let output = core.output();
        let length = output.len().min(most);
        self.read(&output[..length]);
        core.advance(length);
    }

    /// Reads complete frames.
    fn read(&mut self, more: &[u8]) {
        self.came.extend_from_slice(more);
        let came = std::mem::take(&mut self.came);
        let mut bytes = came.as_slice();
        if !self.greeted && bytes.len() >= PREFACE.len() {
            bytes = bytes.strip_prefix(PREFACE).unwrap_or_else(|| panic!("no preface"));
            self.greeted = true;
        }
        while self.greeted
            && let Some(head) = Head::parse(bytes)
        {
            assert!(head.length <= MAX_PAYLOAD_BYTES);
            let Some((payload, rest)) = bytes[frame::HEADER_LEN..].split_at_checked(head.length)
            else {
                break;
            };
            bytes = rest;
            self.frame(head, payload);
        }
        self.came = bytes.to_vec();
    }

    fn frame(&mut self, head: Head, payload: &[u8]) {
        assert!(self.block.is_none() || head.kind == frame::CONTINUATION);
        match head.kind {
            frame::HEADERS => {
                self.begins(head);
                self.block = Some(Vec::new());
                self.block(head, payload);
            }
            frame::CONTINUATION => self.block(head, payload),
            frame::DATA => {
                self.window -= head.length as i64;
                assert!(head.length == 0 || self.window >= 0, "DATA exceeds the window");
                let stream = self
                    .streams
                    .get_mut(&head.stream)
                    .unwrap_or_else(|| panic!("DATA on unknown stream {}", head.stream));
                assert_eq!(*stream, Stream::HeadSent, "DATA on stream {}", head.stream);
                if head.has(frame::END_STREAM) {
                    *stream = Stream::Ended;
                }
            }
            frame::RST_STREAM => {
                let before = self.streams.insert(head.stream, Stream::Reset);
                // This side refuses each frame of a skipped or closed stream again.
                let is_refused = self.is_server && (before.is_some() || head.stream < self.last_id);
                assert!(
                    is_refused || before.is_some_and(|before| before != Stream::Reset),
                    "RST_STREAM on stream {}",
                    head.stream
                );
            }
            _ => {}
        }
    }

    /// Reads a head or trailers.
    fn begins(&mut self, head: Head) {
        let ended = head.has(frame::END_STREAM);
        if !self.is_server && head.stream > self.last_id {
            assert!(!head.stream.is_multiple_of(2));
            self.last_id = head.stream;
            self.streams.insert(head.stream, Stream::Open);
        }
        let stream = self
            .streams
            .get_mut(&head.stream)
            .unwrap_or_else(|| panic!("HEADERS on unknown stream {}", head.stream));
        match stream {
            Stream::Open => {}
            Stream::HeadSent => {
                assert!(ended, "trailers of stream {} without END_STREAM", head.stream)
            }
            Stream::Ended | Stream::Reset => {
                panic!("HEADERS on stream {} in state {stream:?}", head.stream)
            }
        }
        *stream = if ended { Stream::Ended } else { Stream::HeadSent };
    }

    fn block(&mut self, head: Head, payload: &[u8]) {
        let block = self.block.get_or_insert_default();
        block.extend_from_slice(payload);
        if head.has(frame::END_HEADERS) {
            let (block, mut fields) = (self.block.take().unwrap_or_default(), 0);
            let read = self.decoder.decode(&block, |field| {
                assert!(field.is_valid);
                fields += 1;
            });
            assert!(read.is_ok() && fields > 0, "{read:?}");
        }
    }

    /// Tracks the peer's own frames.
    fn does(&mut self, kind: u8, stream: u32, payload: &[u8]) {
        match kind {
            frame::WINDOW_UPDATE if stream == 0 => {
                self.window += i64::from(frame::be_u32(payload) & frame::MAX_U31)
            }
            frame::HEADERS if self.is_server => {
                self.last_id = self.last_id.max(stream);
                self.streams.entry(stream).or_insert(Stream::Open);
            }
            _ => {}
        }
    }
}

/// Sends a frame to the core. Returns whether the connection has ended.
pub(super) fn receive(
    core: &mut Core,
    model: &mut Model,
    kind: u8,
    flags: u8,
    stream: u32,
    payload: &[u8],
) -> bool {
    let head = Head { length: payload.len(), kind, flags, stream };
    if !core.may_read() {
        return false;
    }
    model.does(kind, stream, payload);
    match core.recv_frame(head, payload) {
        Ok(()) => false,
        Err(violation) => {
            assert!(!violation.1.is_empty() && violation.0 != Reason::NO_ERROR);
            core.go_away(violation);
            true
        }
    }
}
