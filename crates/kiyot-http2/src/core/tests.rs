use std::task::Poll;

use bytes::Bytes;
use http::{Request, request::Parts};
use proptest::prelude::*;

use super::*;
use crate::{
    frame::{HEADER_LEN, Head, MAX_U31, PREFACE},
    fuzzing,
};

/// `:status: 200`, and `grpc-status: 0` as a literal without indexing.
const STATUS: &[u8] = &[0x88];
const TRAILERS: &[u8] = b"\x00\x0bgrpc-status\x010";

/// Core with the frames that it has sent.
pub(super) struct Side {
    pub(super) core: Core,
    /// Set until a client has sent the preface of its connection.
    sends_preface: bool,
}

impl Side {
    /// Returns a core whose connection has not begun.
    pub(super) fn over(core: Core) -> Self {
        Self { sends_preface: !core.is_server(), core }
    }

    /// Returns a client whose server has sent these settings.
    fn client(settings: &[(u16, u32)]) -> Self {
        let mut side = Self::over(Core::client());
        let payload: Vec<u8> = settings
            .iter()
            .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        side.fine(frame::SETTINGS, 0, 0, &payload);
        let sent = side.sent();
        assert_eq!(kinds(&sent), [frame::SETTINGS, frame::WINDOW_UPDATE, frame::SETTINGS]);
        assert_eq!((sent[0].0.flags, sent[2].0.flags), (0, frame::ACK));
        side
    }

    /// Receives a frame.
    pub(super) fn receive(
        &mut self,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> Result<(), Violation> {
        self.core.recv_frame(Head { length: payload.len(), kind, flags, stream }, payload)
    }

    /// Receives a valid frame.
    pub(super) fn fine(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.receive(kind, flags, stream, payload).unwrap();
    }

    /// Returns the frames sent since the last call.
    pub(super) fn sent(&mut self) -> Vec<(Head, Vec<u8>)> {
        let bytes = output(&mut self.core);
        let sends_preface = std::mem::take(&mut self.sends_preface);
        parse_frames(if sends_preface { bytes.strip_prefix(PREFACE).unwrap() } else { &bytes })
    }

    /// Polls the data received on a stream.
    pub(super) fn data(&mut self, key: Key) -> Poll<Option<Result<Bytes, Error>>> {
        self.core.poll_data(key, Waker::noop())
    }

    /// Drops both references to a stream.
    pub(super) fn drop_call(&mut self, key: Key) {
        self.core.drop_stream_ref(key);
        self.core.drop_stream_ref(key);
    }

    fn call(&mut self, body: usize) -> Key {
        self.core.send_request(&head(), &vec![1; body].into(), true).unwrap()
    }

    fn response(&mut self, key: Key) -> Poll<Result<http::Response<()>, Error>> {
        self.core.poll_response(key, Waker::noop())
    }
}

fn head() -> Parts {
    Request::post("http://localhost/a/B").body(()).unwrap().into_parts().0
}

/// Takes the whole output.
fn output(core: &mut Core) -> Vec<u8> {
    let mut bytes = Vec::new();
    while !core.output().is_empty() {
        let part = core.output().to_vec();
        core.advance(part.len());
        bytes.extend(part);
    }
    bytes
}

/// Parses complete frames.
fn parse_frames(mut bytes: &[u8]) -> Vec<(Head, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some(head) = Head::parse(bytes) {
        let (payload, rest) = bytes[HEADER_LEN..].split_at(head.length);
        frames.push((head, payload.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty());
    frames
}

pub(super) fn kinds(frames: &[(Head, Vec<u8>)]) -> Vec<u8> {
    frames.iter().map(|(head, _)| head.kind).collect()
}

fn data_of(frames: &[(Head, Vec<u8>)]) -> usize {
    frames.iter().filter(|(head, _)| head.kind == frame::DATA).map(|(head, _)| head.length).sum()
}

#[test]
fn response_is_assembled_from_its_frames() {
    let mut side = Side::client(&[]);
    let key = side.call(5);
    let sent = side.sent();
    assert_eq!(kinds(&sent), [frame::HEADERS, frame::DATA]);
    assert_eq!(sent[1].0.flags, frame::END_STREAM);
    assert!(side.response(key).is_pending());
    // An informational response (RFC 9110, 15.2), then a head in three frames with padding and
    // priority.
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, b"\x08\x03100");
    side.fine(
        frame::HEADERS,
        frame::PADDED | frame::PRIORITY_FLAG,
        1,
        &[2, 0, 0, 0, 0, 7, 0x88, 0, 0],
    );
    side.fine(frame::CONTINUATION, 0, 1, b"\x00\x01a");
    side.fine(frame::CONTINUATION, frame::END_HEADERS, 1, b"\x01b");
    let Poll::Ready(Ok(head)) = side.response(key) else { panic!() };
    assert_eq!((head.status().as_u16(), &head.headers()["a"]), (200, &"b".parse().unwrap()));
    side.fine(frame::DATA, frame::PADDED, 1, &[1, b'x', b'y', 0]);
    // PRIORITY, and an unknown type.
    side.fine(2, 0, 1, &[0; 5]);
    side.fine(0xbe, 0xff, 77, &[1; 30]);
    side.fine(frame::DATA, 0, 1, b"z");
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part == "xyz"));
    assert!(side.data(key).is_pending());
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 1, TRAILERS);
    assert!(matches!(side.data(key), Poll::Ready(None)));
    let Poll::Ready(Ok(Some(trailers))) = side.core.poll_trailers(key, Waker::noop()) else {
        panic!()
    };
    assert_eq!(trailers["grpc-status"], "0");
    assert!(side.core.is_end_stream(key));
    side.drop_call(key);
    assert!(side.sent().is_empty() && side.core.is_empty());
}

/// Verifies F18.
#[test]
fn send_window_is_kept_and_may_be_negative() {
    let mut side = Side::client(&[(4, 1000)]);
    let key = side.call(5000);
    assert_eq!(data_of(&side.sent()), 1000);
    // The window is negative now: 500 less than sent.
    side.fine(frame::SETTINGS, 0, 0, &[0, 4, 0, 0, 1, 244]);
    side.fine(frame::WINDOW_UPDATE, 0, 1, &500_u32.to_be_bytes());
    assert_eq!(data_of(&side.sent()), 0);
    side.fine(frame::WINDOW_UPDATE, 0, 1, &7_u32.to_be_bytes());
    assert_eq!(data_of(&side.sent()), 7);
    side.fine(frame::SETTINGS, 0, 0, &[0, 4, 0, 0, 3, 232]);
    assert_eq!(data_of(&side.sent()), 500);
    side.fine(frame::WINDOW_UPDATE, 0, 1, &10_000_u32.to_be_bytes());
    let sent = side.sent();
    assert_eq!((data_of(&sent), sent[0].0.flags), (3493, frame::END_STREAM));
    side.drop_call(key);
}

#[test]
fn connection_window_is_shared_in_turns() {
    let mut side = Side::client(&[(4, 1 << 20)]);
    let keys: Vec<Key> = (0..4).map(|_| side.call(60_000)).collect();
    assert_eq!(data_of(&side.sent()), 65_535);
    side.fine(frame::WINDOW_UPDATE, 0, 0, &100_000_u32.to_be_bytes());
    let sent = side.sent();
    assert_eq!(data_of(&sent), 100_000);
    // Each waiting stream had its turn.
    let of = |id| sent.iter().any(|(head, _)| head.kind == frame::DATA && head.stream == id);
    assert!(of(3) && of(5) && of(7));
    side.fine(frame::WINDOW_UPDATE, 0, 0, &100_000_u32.to_be_bytes());
    assert_eq!(data_of(&side.sent()), 74_465);
    keys.into_iter().for_each(|key| side.drop_call(key));
    assert!(side.core.is_empty());
}

#[test]
fn window_update_follows_much_released_capacity_and_never_the_end() {
    let mut side = Side::client(&[]);
    let key = side.call(0);
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, STATUS);
    side.sent();
    for _ in 0..16 {
        side.fine(frame::DATA, 0, 1, &[0; 16_384]);
    }
    assert!(side.sent().is_empty());
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part.len() == 16 * 16_384));
    let sent = side.sent();
    assert_eq!(
        (kinds(&sent), frame::be_u32(&sent[0].1)),
        (vec![frame::WINDOW_UPDATE], 16 * 16_384)
    );
    for _ in 0..63 {
        side.fine(frame::DATA, 0, 1, &[0; 16_384]);
    }
    side.fine(frame::DATA, frame::END_STREAM, 1, &[0; 16_384]);
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part.len() == 1 << 20));
    assert!(side.sent().is_empty());
}

#[test]
fn data_above_the_window_is_a_violation() {
    let mut side = Side::client(&[]);
    side.call(0);
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, STATUS);
    for _ in 0..64 {
        side.fine(frame::DATA, 0, 1, &[0; 16_384]);
    }
    assert_eq!(side.receive(frame::DATA, 0, 1, &[0]).unwrap_err().0, Reason::FLOW_CONTROL_ERROR);
}

#[test]
fn requests_above_the_limit_wait_and_open_in_order() {
    let mut side = Side::client(&[(3, 2)]);
    let keys: Vec<Key> = (0..4).map(|_| side.call(3)).collect();
    assert_eq!(kinds(&side.sent()), [frame::HEADERS, frame::DATA, frame::HEADERS, frame::DATA]);
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 3, STATUS);
    let sent = side.sent();
    assert_eq!((kinds(&sent), sent[0].0.stream), (vec![frame::HEADERS, frame::DATA], 5));
    // The last request is cancelled before it is opened, so that nothing is sent for it.
    side.drop_call(keys[3]);
    side.fine(frame::RST_STREAM, 0, 1, &8_u32.to_be_bytes());
    assert!(side.sent().is_empty());
    assert!(matches!(side.response(keys[0]), Poll::Ready(Err(Error::Reset(Reason::CANCEL)))));
    // A lower limit ends no stream.
    side.fine(frame::SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 0]);
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 5, STATUS);
    assert!(matches!(side.response(keys[2]), Poll::Ready(Ok(_))));
}

/// Verifies F18.
#[test]
fn request_cancelled_before_opening_leaves_no_state() {
    let mut side = Side::client(&[(3, 1)]);
    let first = side.call(1);
    let (cancelled, next) = (side.call(2), side.call(3));
    side.drop_call(cancelled);
    // The slab may reuse the cancelled stream's slot; the order stays.
    let last = side.call(4);
    assert_eq!(data_of(&side.sent()), 1);
    for _ in 0..100 {
        let key = side.call(5);
        side.drop_call(key);
    }
    assert_eq!(side.core.pending_open, [next, last]);
    for (id, length) in [(1, 3), (3, 4), (5, 0)] {
        side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, id, STATUS);
        assert_eq!(data_of(&side.sent()), length);
    }
    [first, next, last].into_iter().for_each(|key| side.drop_call(key));
    assert!(side.core.is_empty() && side.sent().is_empty());
    // A connection that takes no new streams doesn't wait for the cancelled stream either.
    side.core.closing = Some(Error::NotSent);
    assert!(side.core.is_done());
}

/// Verifies F18.
#[test]
fn response_body_of_wrong_length_is_reset() {
    let length = |length: &str| {
        [b"\x88\x0f\x0d", [length.len() as u8].as_slice(), length.as_bytes()].concat()
    };
    let cases: [(&str, &[&[u8]], bool); 6] = [
        ("3", &[b"abc"], true),
        ("3", &[b"ab", b"", b"c", b""], true),
        ("0", &[b""], true),
        ("3", &[b"ab"], false),
        ("3", &[b"ab", b"cd"], false),
        ("3x", &[b"abc"], false),
    ];
    let mut side = Side::client(&[]);
    for (number, (says, parts, is_fine)) in cases.into_iter().enumerate() {
        let (key, id) = (side.call(0), 2 * number as u32 + 1);
        side.sent();
        side.fine(frame::HEADERS, frame::END_HEADERS, id, &length(says));
        for (number, part) in parts.iter().enumerate() {
            side.fine(
                frame::DATA,
                if number + 1 == parts.len() { frame::END_STREAM } else { 0 },
                id,
                part,
            );
        }
        let sent = side.sent();
        assert_eq!(
            kinds(&sent),
            if is_fine { vec![] } else { vec![frame::RST_STREAM] },
            "{says} {parts:?}"
        );
        let came = std::iter::from_fn(|| match side.data(key) {
            Poll::Ready(part) => part,
            Poll::Pending => panic!("{says} {parts:?} has not ended"),
        });
        let came: Vec<_> = came.take(4).collect();
        assert_eq!(came.iter().all(Result::is_ok), is_fine, "{says} {parts:?}");
        side.drop_call(key);
    }
    // Trailers and a head with END_STREAM end the stream as well.
    for blocks in [&[&length("2")[..], TRAILERS][..], &[&length("2")]] {
        let key = side.call(0);
        let id = side.sent()[0].0.stream;
        for (number, block) in blocks.iter().enumerate() {
            let end = if number + 1 == blocks.len() { frame::END_STREAM } else { 0 };
            side.fine(frame::HEADERS, frame::END_HEADERS | end, id, block);
        }
        assert_eq!(kinds(&side.sent()), [frame::RST_STREAM]);
        side.drop_call(key);
    }
    // For 304 and responses to HEAD, the length describes a body that is not sent (RFC 9110, 8.6).
    let mut head = head();
    for (method, block) in [("POST", b"\x8b\x0f\x0d\x012"), ("HEAD", b"\x88\x0f\x0d\x012")] {
        head.method = method.parse().unwrap();
        let key = side.core.send_request(&head, &Bytes::new(), true).unwrap();
        let id = side.sent()[0].0.stream;
        side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, id, block);
        let Poll::Ready(Ok(head)) = side.response(key) else { panic!() };
        assert_eq!(head.headers()["content-length"], "2");
        assert!(side.core.is_end_stream(key) && side.sent().is_empty());
        side.drop_call(key);
    }
    assert!(side.core.is_empty());
}

#[test]
fn frames_of_a_cancelled_request_are_ignored() {
    let mut side = Side::client(&[]);
    let key = side.call(0);
    side.drop_call(key);
    assert_eq!(kinds(&side.sent()), [frame::HEADERS, frame::RST_STREAM]);
    // The block changes the dynamic table all the same.
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, b"\x88\x40\x01a\x01b");
    side.fine(frame::DATA, 0, 1, &[0; 100]);
    side.fine(frame::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]);
    side.fine(frame::RST_STREAM, 0, 1, &[0; 4]);
    let next = side.call(0);
    side.fine(frame::HEADERS, frame::END_HEADERS, 3, &[0x88, 0x80 | 62]);
    assert!(matches!(side.response(next), Poll::Ready(Ok(head)) if head.headers()["a"] == "b"));
}

/// Verifies F18.
#[test]
fn request_refused_by_goaway_or_reset_is_retryable() {
    let mut side = Side::client(&[(3, 2)]);
    let keys: Vec<Key> = (0..3).map(|_| side.call(0)).collect();
    side.fine(frame::GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]);
    for key in &keys[1..] {
        let Poll::Ready(Err(error)) = side.response(*key) else { panic!() };
        assert!(error.is_retryable(), "{error}");
    }
    assert!(side.core.send_request(&head(), &Bytes::new(), true).is_err());
    assert!(side.response(keys[0]).is_pending() && !side.core.is_done());
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 1, STATUS);
    assert!(matches!(side.response(keys[0]), Poll::Ready(Ok(_))) && side.core.is_done());
    let mut side = Side::client(&[]);
    let key = side.call(0);
    side.fine(frame::RST_STREAM, 0, 1, &u32::from(Reason::REFUSED_STREAM).to_be_bytes());
    assert!(matches!(side.response(key), Poll::Ready(Err(error)) if error.is_retryable()));
}

/// Verifies F18.
#[test]
fn unwritten_request_is_retryable() {
    let error = |side: &mut Side, key| match side.response(key) {
        Poll::Ready(Err(error)) => error,
        other => panic!("{other:?}"),
    };
    let mut side = Side::client(&[]);
    let written = side.call(5);
    side.sent();
    let unwritten = side.call(5);
    side.core.close(&Error::Closed);
    assert!(matches!(error(&mut side, written), Error::Closed));
    assert!(error(&mut side, unwritten).is_retryable());
    // After a partial write the server may have begun.
    let mut side = Side::client(&[]);
    let key = side.call(5);
    assert!(side.core.output().len() > 1);
    side.core.advance(1);
    side.core.close(&Error::Closed);
    assert!(!error(&mut side, key).is_retryable());
}

/// Verifies F18.
#[test]
fn padding_alone_returns_its_window() {
    let mut side = Side::client(&[]);
    let key = side.call(0);
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, STATUS);
    side.sent();
    let mut window = i64::from(STREAM_WINDOW_BYTES);
    for _ in 0..2 * STREAM_WINDOW_BYTES / 256 {
        side.fine(frame::DATA, frame::PADDED, 1, &[&[255][..], &[0; 255]].concat());
        window -= 256;
        window +=
            side.sent().iter().map(|(_, payload)| i64::from(frame::be_u32(payload))).sum::<i64>();
    }
    assert!(window > 0 && side.data(key).is_pending());
}

#[test]
fn complete_response_survives_a_reset() {
    let mut side = Side::client(&[]);
    let key = side.core.send_request(&head(), &Bytes::from_static(b"begun"), false).unwrap();
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, STATUS);
    side.fine(frame::DATA, 0, 1, b"no more");
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, 1, TRAILERS);
    side.fine(frame::RST_STREAM, 0, 1, &[0; 4]);
    assert!(matches!(side.core.poll_ready(key, Waker::noop()), Poll::Ready(Err(_))));
    assert!(matches!(side.response(key), Poll::Ready(Ok(_))));
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part == "no more"));
    assert!(matches!(side.core.poll_trailers(key, Waker::noop()), Poll::Ready(Ok(Some(_)))));
    // A reset is an error only after the data that arrived before it was read.
    let key = side.call(0);
    side.fine(frame::HEADERS, frame::END_HEADERS, 3, STATUS);
    side.fine(frame::DATA, 0, 3, b"half");
    side.fine(frame::RST_STREAM, 0, 3, &11_u32.to_be_bytes());
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part == "half"));
    assert!(matches!(
        side.data(key),
        Poll::Ready(Some(Err(Error::Reset(Reason::ENHANCE_YOUR_CALM))))
    ));
}

/// Verifies F18.
#[test]
fn malformed_response_resets_its_stream_alone() {
    let malformed: [(u8, &[u8]); 8] = [
        (frame::END_HEADERS, TRAILERS),
        (frame::END_HEADERS, b"\x08\x03abc"),
        (frame::END_HEADERS, b"\x88\x88"),
        (frame::END_HEADERS, b"\x88\x83"),
        (frame::END_HEADERS, b"\x00\x01a\x01b\x88"),
        (frame::END_HEADERS, b"\x88\x00\x01A\x01b"),
        (frame::END_HEADERS, b"\x88\x00\x0aconnection\x05close"),
        (frame::END_HEADERS | frame::END_STREAM, b"\x08\x03100"),
    ];
    let mut side = Side::client(&[]);
    for (number, (flags, block)) in malformed.into_iter().enumerate() {
        let (key, id) = (side.call(0), 2 * number as u32 + 1);
        side.sent();
        side.fine(frame::HEADERS, flags, id, block);
        let sent = side.sent();
        assert_eq!(
            (kinds(&sent), sent[0].1.as_slice()),
            (vec![frame::RST_STREAM], &[0, 0, 0, 1][..]),
            "{block:?}"
        );
        let Poll::Ready(Err(error)) = side.response(key) else { panic!() };
        assert!(error.reset_reason().is_none() && !error.is_retryable(), "{error}");
    }
    for (kind, flags, payload) in [
        (frame::DATA, 0, STATUS),
        (frame::HEADERS, frame::END_HEADERS, STATUS),
        (frame::HEADERS, frame::END_HEADERS, TRAILERS),
    ] {
        let key = side.call(0);
        let id = side.sent()[0].0.stream;
        if kind == frame::HEADERS {
            side.fine(kind, flags, id, STATUS);
        }
        side.fine(kind, flags, id, payload);
        assert_eq!(kinds(&side.sent()), [frame::RST_STREAM]);
        assert!(matches!(side.data(key), Poll::Ready(Some(Err(Error::Malformed(_))))));
    }
}

#[test]
fn header_list_above_the_limit_is_rejected() {
    let mut side = Side::client(&[]);
    let key = side.call(0);
    side.sent();
    // The same indexed field many times: few bytes on the wire.
    side.fine(frame::HEADERS, 0, 1, &[&b"\x88\x40\x01a\x7f\x81\x07"[..], &[b'x'; 1024]].concat());
    side.fine(frame::CONTINUATION, frame::END_HEADERS, 1, &[0x80 | 62; 2000]);
    assert_eq!(kinds(&side.sent()), [frame::RST_STREAM]);
    assert!(matches!(side.response(key), Poll::Ready(Err(Error::Malformed(_)))));
    side.call(0);
    side.fine(frame::HEADERS, 0, 3, STATUS);
    let violation = (0..1000)
        .find_map(|_| side.receive(frame::CONTINUATION, 0, 3, &[0; 16_384]).err())
        .unwrap();
    assert_eq!(violation.0, Reason::ENHANCE_YOUR_CALM);
}

/// Verifies F18.
#[test]
fn violation_ends_the_connection_with_its_reason() {
    let cases: [(Reason, u8, u8, u32, &[u8]); 22] = [
        (Reason::PROTOCOL_ERROR, frame::DATA, 0, 0, b"x"),
        (Reason::PROTOCOL_ERROR, frame::DATA, 0, 2, b"x"),
        (Reason::PROTOCOL_ERROR, frame::DATA, 0, 3, b"x"),
        (Reason::PROTOCOL_ERROR, frame::DATA, frame::PADDED, 1, &[3, 0]),
        (Reason::FRAME_SIZE_ERROR, frame::DATA, frame::PADDED, 1, &[]),
        (Reason::PROTOCOL_ERROR, frame::HEADERS, frame::END_HEADERS, 3, STATUS),
        (Reason::COMPRESSION_ERROR, frame::HEADERS, frame::END_HEADERS, 1, &[0xff]),
        (Reason::FRAME_SIZE_ERROR, frame::RST_STREAM, 0, 1, &[0; 5]),
        (Reason::PROTOCOL_ERROR, frame::RST_STREAM, 0, 0, &[0; 4]),
        (Reason::PROTOCOL_ERROR, frame::SETTINGS, 0, 1, &[]),
        (Reason::FRAME_SIZE_ERROR, frame::SETTINGS, 0, 0, &[0; 5]),
        (Reason::FRAME_SIZE_ERROR, frame::SETTINGS, frame::ACK, 0, &[0; 6]),
        (Reason::FLOW_CONTROL_ERROR, frame::SETTINGS, 0, 0, &[0, 4, 0x80, 0, 0, 0]),
        (Reason::PROTOCOL_ERROR, frame::SETTINGS, 0, 0, &[0, 5, 0, 0, 0, 1]),
        (Reason::PROTOCOL_ERROR, frame::SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]),
        (Reason::PROTOCOL_ERROR, frame::PUSH_PROMISE, 0, 1, &[0; 4]),
        (Reason::FRAME_SIZE_ERROR, frame::PING, 0, 0, &[0; 7]),
        (Reason::FRAME_SIZE_ERROR, frame::GOAWAY, 0, 0, &[0; 7]),
        (Reason::PROTOCOL_ERROR, frame::WINDOW_UPDATE, 0, 0, &[0; 4]),
        (Reason::FLOW_CONTROL_ERROR, frame::WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]),
        (Reason::PROTOCOL_ERROR, frame::WINDOW_UPDATE, 0, 9, &[0, 0, 0, 1]),
        (Reason::PROTOCOL_ERROR, frame::CONTINUATION, 0, 1, STATUS),
    ];
    for (reason, kind, flags, stream, payload) in cases {
        let mut side = Side::client(&[]);
        let key = side.call(0);
        side.sent();
        let violation = side.receive(kind, flags, stream, payload).unwrap_err();
        assert_eq!(violation.0, reason, "{kind} {stream} {violation}");
        side.core.go_away(violation);
        let sent = side.sent();
        assert_eq!(kinds(&sent), [frame::GOAWAY]);
        assert!(sent[0].1.ends_with(violation.1.as_bytes()));
        let Poll::Ready(Err(error)) = side.response(key) else { panic!() };
        assert!(error.to_string().contains(violation.1), "{error}");
    }
    let mut side = Side::over(Core::client());
    assert!(side.receive(frame::PING, 0, 0, &[0; 8]).is_err(), "first frame is not SETTINGS");
    let mut side = Side::client(&[]);
    side.call(0);
    side.fine(frame::HEADERS, 0, 1, STATUS);
    assert!(side.receive(frame::PING, 0, 0, &[0; 8]).is_err(), "header block interrupted");
}

/// Verifies F18.
#[test]
fn pings_are_acknowledged_within_the_output_limit() {
    let mut side = Side::client(&[]);
    side.fine(frame::PING, 0, 0, b"whatever");
    side.fine(frame::PING, frame::ACK, 0, b"whatever");
    let sent = side.sent();
    assert_eq!(
        (kinds(&sent), sent[0].0.flags, sent[0].1.as_slice()),
        (vec![frame::PING], frame::ACK, &b"whatever"[..])
    );
    let pings = (0..1_000_000)
        .take_while(|_| side.core.may_read() && side.receive(frame::PING, 0, 0, &[0; 8]).is_ok())
        .count();
    assert!(pings < MAX_BACKLOG_BYTES / 17 + 2, "{pings}");
    // No request is added to a full output either.
    let key = side.call(0);
    assert!(side.core.backlog() < MAX_BACKLOG_BYTES + 17);
    side.sent();
    side.fine(frame::HEADERS, frame::END_HEADERS, 1, STATUS);
    assert!(matches!(side.response(key), Poll::Ready(Ok(_))));
}

#[test]
fn exhausted_stream_ids_make_requests_retryable() {
    let mut side = Side::client(&[]);
    side.core.next_id = MAX_U31;
    let key = side.call(0);
    let error = side.core.send_request(&head(), &Bytes::new(), true).unwrap_err();
    assert!(error.is_retryable());
    side.fine(frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, MAX_U31, STATUS);
    assert!(matches!(side.response(key), Poll::Ready(Ok(_))) && side.core.is_done());
}

#[test]
fn peer_table_size_limits_the_encoder() {
    let mut side = Side::client(&[(1, 0)]);
    side.call(0);
    side.call(0);
    let sent = side.sent();
    assert_eq!(sent[0].1[0], 0x20, "the size update comes first");
    // Without a table the same request has the same bytes.
    assert_eq!(sent[0].1[1..], sent[1].1);
}

#[test]
fn long_header_list_is_split_into_frames() {
    let mut side = Side::client(&[]);
    let mut long = head();
    long.headers.insert("x", "y".repeat(40_000).parse().unwrap());
    side.core.send_request(&long, &Bytes::from_static(b"body"), true).unwrap();
    let sent = side.sent();
    assert_eq!(
        kinds(&sent),
        [frame::HEADERS, frame::CONTINUATION, frame::CONTINUATION, frame::DATA]
    );
    assert_eq!(
        sent.iter().map(|(head, _)| head.flags).collect::<Vec<_>>(),
        [0, 0, frame::END_HEADERS, frame::END_STREAM]
    );
}

proptest! {
    /// Verifies F18.
    #[test]
    fn arbitrary_runtime_frames_keep_all_properties(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        fuzzing::runtime(&bytes);
    }
}
