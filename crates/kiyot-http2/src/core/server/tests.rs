use std::task::Waker;

use bytes::Bytes;
use http::{Response, header::HeaderValue};
use proptest::prelude::*;

use super::*;
use crate::{
    core::tests::{Side, kinds},
    frame::PREFACE,
    fuzzing,
};

/// `:method: POST`, `:scheme: http`, `:path: /`.
const REQUEST: &[u8] = &[0x83, 0x86, 0x84];
const END: u8 = frame::END_STREAM;
const WHOLE: u8 = frame::END_HEADERS | frame::END_STREAM;

impl Side {
    /// Returns a server of at most `most` streams, whose client has sent its preface.
    fn server(most: u32) -> Self {
        let mut side = Self::over(Core::server(most));
        let begin = [&PREFACE[..], &[0, 0, 0, frame::SETTINGS, 0, 0, 0, 0, 0]].concat();
        assert_eq!(side.core.recv(&begin).unwrap(), begin.len());
        let sent = side.sent();
        assert_eq!(kinds(&sent), [frame::SETTINGS, frame::WINDOW_UPDATE, frame::SETTINGS]);
        assert_eq!(sent[0].1[..6], [[0, 3].as_slice(), &most.to_be_bytes()].concat());
        side
    }

    /// Accepts a complete request with this header block.
    fn accept(&mut self, id: u32, block: &[u8]) -> Key {
        self.fine(frame::HEADERS, WHOLE, id, block);
        self.core.accept().expect("a call").0
    }

    /// Returns the reason of the only frame sent, an RST_STREAM.
    fn reset(&mut self) -> Reason {
        let sent = self.sent();
        assert_eq!(kinds(&sent), [frame::RST_STREAM]);
        frame::be_u32(&sent[0].1).into()
    }

    fn is_reset(&mut self, key: Key) -> bool {
        self.core.poll_reset(key, &Context::from_waker(Waker::noop())).is_ready()
    }

    fn send_response(&mut self, key: Key, ended: bool) -> Result<(), Error> {
        self.core.send_response(key, &Response::new(()).into_parts().0, ended)
    }
}

/// Encodes a field as a literal without indexing.
fn field(name: &str, value: &str) -> Vec<u8> {
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

fn with(name: &str, value: &str) -> Vec<u8> {
    [REQUEST, &field(name, value)].concat()
}

#[test]
fn request_frames_are_received_and_response_is_sent_at_once() {
    let mut side = Side::server(9);
    side.fine(frame::HEADERS, 0, 1, &[0x83, 0x86]);
    side.fine(
        frame::CONTINUATION,
        frame::END_HEADERS,
        1,
        &[&[4, 4][..], b"/a/B", &field(":authority", "here"), &field("x", "y")].concat(),
    );
    let (key, head) = side.core.accept().unwrap();
    assert_eq!(
        (head.method().as_str(), head.uri().to_string(), &head.headers()["x"]),
        ("POST", "http://here/a/B".into(), &HeaderValue::from_static("y"))
    );
    assert!(side.data(key).is_pending() && !side.is_reset(key));
    side.fine(frame::DATA, frame::PADDED, 1, &[1, b'x', b'y', 0]);
    side.fine(frame::DATA, 0, 1, b"");
    side.fine(frame::PRIORITY, 0, 1, &[0; 5]);
    side.fine(frame::PRIORITY, 0, 7, &[0, 0, 0, 1, 0]);
    side.fine(0xbe, 0xff, 77, &[1; 30]);
    side.fine(frame::DATA, 0, 1, b"z");
    assert!(matches!(side.data(key), Poll::Ready(Some(Ok(part))) if part == "xyz"));
    side.fine(frame::HEADERS, WHOLE, 1, &field("t", "u"));
    assert!(matches!(side.data(key), Poll::Ready(None)));
    let trailers = side.core.poll_trailers(key, Waker::noop());
    assert!(matches!(trailers, Poll::Ready(Ok(Some(trailers))) if trailers["t"] == "u"));
    assert!(side.sent().is_empty() && side.core.is_end_stream(key));

    side.send_response(key, false).unwrap();
    side.core.send_data(key, Bytes::from_static(b"answer"));
    assert!(matches!(side.core.poll_ready(key, Waker::noop()), Poll::Ready(Ok(()))));
    side.core.finish(key, Some([(http::header::AGE, HeaderValue::from(7))].into_iter().collect()));
    side.drop_call(key);
    let sent = side.sent();
    assert_eq!(kinds(&sent), [frame::HEADERS, frame::DATA, frame::HEADERS]);
    assert_eq!(
        (sent[0].1.as_slice(), sent[1].1.as_slice(), sent[2].0.flags),
        (&[0x88][..], &b"answer"[..], WHOLE)
    );
    assert!(side.core.is_empty());
}

/// Verifies F19.
#[test]
fn malformed_request_resets_its_stream_alone() {
    let malformed: [Vec<u8>; 19] = [
        vec![0x83, 0x86],
        vec![0x83, 0x84],
        vec![0x86, 0x84],
        [REQUEST, &[0x83]].concat(),
        [REQUEST, &[0x86]].concat(),
        [REQUEST, &[0x84]].concat(),
        [REQUEST, &[0x88]].concat(),
        [&field("x", "y"), REQUEST].concat(),
        [&[0x83, 0x86][..], &field(":path", "")].concat(),
        [&[0x83, 0x86][..], &field(":path", "a/b")].concat(),
        [&[0x86, 0x84][..], &field(":method", "PO ST")].concat(),
        [&[0x86, 0x84][..], &field(":method", "CONNECT")].concat(),
        [&[0x83, 0x84][..], &field(":scheme", "no scheme")].concat(),
        [with(":authority", "here"), field(":authority", "here")].concat(),
        with(":new", "x"),
        with("Upper", "x"),
        with("connection", "close"),
        with("te", "gzip"),
        with("content-length", "-1"),
    ];
    let mut side = Side::server(9);
    for (number, block) in malformed.iter().enumerate() {
        side.fine(frame::HEADERS, WHOLE, 2 * number as u32 + 1, block);
        assert!(side.core.accept().is_none(), "{block:?}");
        assert_eq!(side.reset(), Reason::PROTOCOL_ERROR, "{block:?}");
    }
    let key = side.accept(101, &with("te", "trailers"));
    side.send_response(key, true).unwrap();
    assert_eq!(side.sent()[0].0.flags, WHOLE);
    // Malformed trailers.
    for (number, (flags, block)) in
        [(frame::END_HEADERS, field("x", "y")), (WHOLE, vec![0x84]), (WHOLE, vec![0x88])]
            .into_iter()
            .enumerate()
    {
        let id = 103 + 2 * number as u32;
        side.fine(frame::HEADERS, frame::END_HEADERS, id, REQUEST);
        let (key, _) = side.core.accept().unwrap();
        side.fine(frame::HEADERS, flags, id, &block);
        assert_eq!(side.reset(), Reason::PROTOCOL_ERROR);
        assert!(
            side.is_reset(key)
                && matches!(side.data(key), Poll::Ready(Some(Err(Error::Malformed(_)))))
        );
        side.drop_call(key);
    }
    assert!(side.sent().is_empty());
}

/// grpc-go sends the socket's path as `:authority`, plain or encoded.
/// Verifies F19.
#[test]
fn authority_that_is_a_path_becomes_localhost() {
    let mut side = Side::server(9);
    for (number, (says, is)) in [
        ("here:7", "here:7"),
        ("/run/x.sock", "localhost"),
        ("%2Frun%2Fx.sock", "localhost"),
        ("", "localhost"),
    ]
    .into_iter()
    .enumerate()
    {
        side.fine(frame::HEADERS, WHOLE, 2 * number as u32 + 1, &with(":authority", says));
        let (key, head) = side.core.accept().expect(says);
        assert_eq!(head.uri().authority().unwrap(), is);
        side.drop_call(key);
    }
}

/// Verifies F19.
#[test]
fn request_body_of_wrong_length_is_reset() {
    let mut side = Side::server(99);
    let parts: [(&str, &[&[u8]], bool); 7] = [
        ("3", &[b"abc"], true),
        ("3", &[b"a", b"bc", b""], true),
        ("0", &[b""], true),
        ("3", &[b"ab"], false),
        ("3", &[b"ab", b""], false),
        ("3", &[b"ab", b"cd"], false),
        ("18446744073709551616", &[b"ab"], false),
    ];
    for (number, (says, parts, is_fine)) in parts.into_iter().enumerate() {
        let id = 2 * number as u32 + 1;
        side.fine(frame::HEADERS, frame::END_HEADERS, id, &with("content-length", says));
        for (number, part) in parts.iter().enumerate() {
            side.fine(frame::DATA, if number + 1 == parts.len() { END } else { 0 }, id, part);
        }
        let sent = side.sent();
        assert_eq!(sent.is_empty(), is_fine, "{says} {parts:?}");
        assert!(
            sent.iter()
                .all(|(head, payload)| head.kind == frame::RST_STREAM && payload == &[0, 0, 0, 1]),
            "{sent:?}"
        );
    }
    // Trailers and a missing body end the stream as well; repeated equal lengths are valid (RFC
    // 9110, 8.6).
    side.fine(frame::HEADERS, frame::END_HEADERS, 101, &with("content-length", "1"));
    side.fine(frame::HEADERS, WHOLE, 101, &field("x", "y"));
    assert_eq!(side.reset(), Reason::PROTOCOL_ERROR);
    side.fine(frame::HEADERS, WHOLE, 103, &with("content-length", "1"));
    assert_eq!(side.reset(), Reason::PROTOCOL_ERROR);
    side.fine(
        frame::HEADERS,
        WHOLE,
        105,
        &[with("content-length", "0"), field("content-length", "0")].concat(),
    );
    assert!(side.sent().is_empty());
    side.fine(
        frame::HEADERS,
        WHOLE,
        107,
        &[with("content-length", "0"), field("content-length", "1")].concat(),
    );
    assert_eq!(side.reset(), Reason::PROTOCOL_ERROR);
}

/// Verifies F19.
#[test]
fn requests_above_the_limit_are_refused_and_their_late_frames_ignored() {
    let mut side = Side::server(2);
    let first = side.accept(1, REQUEST);
    side.fine(frame::HEADERS, frame::END_HEADERS, 3, REQUEST);
    side.fine(
        frame::HEADERS,
        frame::END_HEADERS,
        5,
        &[REQUEST, &[0x40, 1, b'a', 1, b'b']].concat(),
    );
    assert_eq!(side.reset(), Reason::REFUSED_STREAM);
    side.fine(frame::DATA, 0, 5, b"under way");
    side.fine(frame::HEADERS, WHOLE, 5, &field("t", "u"));
    assert!(side.sent().is_empty());
    // The client has ended this stream, so that no frame can be in flight.
    side.send_response(first, true).unwrap();
    side.drop_call(first);
    side.sent();
    side.fine(frame::DATA, 0, 1, b"x");
    assert_eq!(side.reset(), Reason::STREAM_CLOSED);
    let key = side.accept(7, &[REQUEST, &[0x80 | 62]].concat());
    assert!(!side.is_reset(key));
    assert_eq!(
        side.receive(frame::HEADERS, WHOLE, 1, REQUEST).unwrap_err().0,
        Reason::STREAM_CLOSED
    );
}

/// Verifies R4.
#[test]
fn raised_limit_is_announced_and_lowered_limit_is_not() {
    let mut side = Side::server(1);
    let first = side.accept(1, REQUEST);
    for limit in [1, 0] {
        side.core.raise_max_open(limit);
        assert!(side.sent().is_empty());
    }
    side.core.raise_max_open(2);
    let sent = side.sent();
    assert_eq!(kinds(&sent), [frame::SETTINGS]);
    assert_eq!((sent[0].0.flags, sent[0].1.as_slice()), (0, &[0, 3, 0, 0, 0, 2][..]));
    side.fine(frame::SETTINGS, frame::ACK, 0, b"");
    let second = side.accept(3, REQUEST);
    side.fine(frame::HEADERS, WHOLE, 5, REQUEST);
    assert_eq!(side.reset(), Reason::REFUSED_STREAM);
    for key in [first, second] {
        side.send_response(key, true).unwrap();
        side.drop_call(key);
    }
    assert!(side.core.is_empty());
}

#[test]
fn remembered_resets_are_bounded() {
    let mut side = Side::server(0);
    for number in 0..2 * MAX_RESET_STREAMS as u32 {
        side.fine(frame::HEADERS, frame::END_HEADERS, 2 * number + 1, REQUEST);
        side.sent();
    }
    let Role::Server(server) = &side.core.role else { panic!() };
    assert_eq!(
        (server.reset_streams.len(), server.reset_order.len()),
        (MAX_RESET_STREAMS, MAX_RESET_STREAMS)
    );
    assert!(side.core.is_empty());
}

#[test]
fn reset_by_client_ends_the_stream_in_any_state() {
    let mut side = Side::server(9);
    let keys = [side.accept(1, REQUEST), side.accept(3, REQUEST)];
    side.send_response(keys[1], false).unwrap();
    side.sent();
    for (key, id) in keys.into_iter().zip([1, 3]) {
        side.fine(frame::RST_STREAM, 0, id, &8_u32.to_be_bytes());
        assert!(side.is_reset(key));
        assert!(side.send_response(key, true).is_err());
        assert!(matches!(side.core.poll_ready(key, Waker::noop()), Poll::Ready(Err(_))));
        side.drop_call(key);
    }
    assert!(side.sent().is_empty() && side.core.is_empty());
    // A request that is cancelled before it is accepted is skipped.
    side.fine(frame::HEADERS, WHOLE, 5, REQUEST);
    side.fine(frame::HEADERS, WHOLE, 7, REQUEST);
    side.fine(frame::RST_STREAM, 0, 5, &8_u32.to_be_bytes());
    let (key, _) = side.core.accept().unwrap();
    side.drop_call(key);
    assert!(side.core.accept().is_none() && side.core.is_empty());
}

#[test]
fn dropped_stream_is_reset_with_cancel_or_after_a_response_no_error() {
    let mut side = Side::server(9);
    let key = side.accept(1, REQUEST);
    side.drop_call(key);
    assert_eq!(side.reset(), Reason::CANCEL);
    side.fine(frame::HEADERS, frame::END_HEADERS, 3, REQUEST);
    let (key, _) = side.core.accept().unwrap();
    side.fine(frame::DATA, 0, 3, &[0; 100]);
    side.send_response(key, true).unwrap();
    assert_eq!(kinds(&side.sent()), [frame::HEADERS]);
    side.drop_call(key);
    assert_eq!(side.reset(), Reason::NO_ERROR);
    side.fine(frame::DATA, END, 3, &[0; 100]);
    assert!(side.sent().is_empty() && side.core.is_empty());
    // Data without a reader is dropped.
    side.fine(frame::HEADERS, frame::END_HEADERS, 5, REQUEST);
    let (key, _) = side.core.accept().unwrap();
    side.fine(frame::DATA, 0, 5, &[0; 100]);
    side.core.discard_recv(key);
    side.core.drop_stream_ref(key);
    side.fine(frame::DATA, END, 5, &[0; 100]);
    assert_eq!(side.core.unclaimed, 400);
    side.send_response(key, true).unwrap();
    side.core.drop_stream_ref(key);
    assert!(side.core.is_empty());
}

#[test]
fn response_follows_the_window_and_trailers_outlive_their_sender() {
    let mut side = Side::server(9);
    side.fine(frame::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 10]);
    let key = side.accept(1, REQUEST);
    side.sent();
    side.send_response(key, false).unwrap();
    side.core.send_data(key, Bytes::from_static(&[1; 25]));
    assert!(
        side.core.poll_ready(key, Waker::noop()).is_pending() && side.core.unsent_bytes(key) == 15
    );
    side.fine(frame::WINDOW_UPDATE, 0, 1, &10_u32.to_be_bytes());
    assert!(
        side.core.poll_ready(key, Waker::noop()).is_pending() && side.core.unsent_bytes(key) == 5
    );
    side.fine(frame::WINDOW_UPDATE, 0, 1, &10_u32.to_be_bytes());
    assert!(side.core.poll_ready(key, Waker::noop()).is_ready());
    assert_eq!(kinds(&side.sent()), [frame::HEADERS, frame::DATA, frame::DATA, frame::DATA]);
    // Trailers that wait for the client to read are sent although the references are dropped.
    let other = side.accept(3, REQUEST);
    side.send_response(other, false).unwrap();
    side.core.out.extend([0; super::super::MAX_OUTPUT_BYTES]);
    side.core.finish(other, None);
    side.drop_call(other);
    assert!(!side.core.is_empty());
    let waits = side.core.out.len();
    side.core.advance(waits);
    let sent = side.sent();
    assert_eq!((kinds(&sent), sent[0].0.flags), (vec![frame::DATA], END));
    side.drop_call(key);
    assert!(side.core.is_empty());
}

/// Verifies F19.
#[test]
fn graceful_shutdown_accepts_requests_in_flight() {
    let mut side = Side::server(9);
    let key = side.accept(1, REQUEST);
    side.core.graceful_shutdown();
    side.core.graceful_shutdown();
    let sent = side.sent();
    assert_eq!(
        (kinds(&sent), frame::be_u32(&sent[0].1)),
        (vec![frame::GOAWAY, frame::PING], MAX_U31)
    );
    // This request was in flight.
    let late = side.accept(3, REQUEST);
    side.fine(frame::PING, frame::ACK, 0, b"whatever");
    assert!(side.sent().is_empty());
    side.fine(frame::PING, frame::ACK, 0, &sent[1].1);
    let last = side.sent();
    assert_eq!((kinds(&last), frame::be_u32(&last[0].1)), (vec![frame::GOAWAY], 3));
    // Later requests get no frame: the client sends them on another connection.
    side.fine(frame::HEADERS, frame::END_HEADERS, 5, REQUEST);
    side.fine(frame::DATA, END, 5, b"x");
    assert!(side.core.accept().is_none() && side.sent().is_empty());
    for key in [key, late] {
        assert!(!side.core.is_done());
        side.send_response(key, true).unwrap();
        side.drop_call(key);
    }
    assert!(side.core.is_done());
    side.sent();
    // The last stream id never grows (RFC 9113, 6.8).
    side.core.go_away(Violation(Reason::PROTOCOL_ERROR, "whatever"));
    assert_eq!(frame::be_u32(&side.sent()[0].1), 3);
}

#[test]
fn client_goaway_leaves_open_streams() {
    let mut side = Side::server(9);
    let key = side.accept(1, REQUEST);
    side.fine(frame::GOAWAY, 0, 0, &[0; 8]);
    assert!(!side.core.is_done() && !side.is_reset(key));
    side.send_response(key, true).unwrap();
    side.drop_call(key);
    assert!(side.core.is_done());
}

#[test]
fn header_list_above_the_limit_is_rejected() {
    let mut side = Side::server(9);
    // The same indexed field many times: few bytes on the wire.
    side.fine(frame::HEADERS, 0, 1, &[REQUEST, b"\x40\x01a\x7f\x81\x07", &[b'x'; 1024]].concat());
    side.fine(frame::CONTINUATION, frame::END_HEADERS, 1, &[0x80 | 62; 2000]);
    assert!(side.core.accept().is_none());
    let sent = side.sent();
    assert_eq!(kinds(&sent), [frame::HEADERS, frame::RST_STREAM]);
    assert!(sent[0].1.ends_with(b"431") && sent[1].1 == [0; 4], "{sent:?}");
    side.fine(frame::HEADERS, 0, 3, REQUEST);
    let mut frames = 0;
    let violation = std::iter::repeat_with(|| side.receive(frame::CONTINUATION, 0, 3, &[]))
        .inspect(|_| frames += 1)
        .find_map(Result::err)
        .unwrap();
    assert_eq!(violation.0, Reason::ENHANCE_YOUR_CALM);
    assert!(frames < 200, "{frames}");
}

/// Verifies F19.
#[test]
fn violation_ends_the_connection_with_its_reason() {
    let cases: [(Reason, u8, u8, u32, &[u8]); 16] = [
        (Reason::PROTOCOL_ERROR, frame::HEADERS, WHOLE, 0, REQUEST),
        (Reason::PROTOCOL_ERROR, frame::HEADERS, WHOLE, 2, REQUEST),
        (Reason::STREAM_CLOSED, frame::HEADERS, WHOLE, 1, REQUEST),
        (Reason::PROTOCOL_ERROR, frame::DATA, 0, 0, b"x"),
        (Reason::PROTOCOL_ERROR, frame::DATA, 0, 5, b"x"),
        (Reason::PROTOCOL_ERROR, frame::RST_STREAM, 0, 5, &[0; 4]),
        (Reason::PROTOCOL_ERROR, frame::WINDOW_UPDATE, 0, 5, &[0, 0, 0, 1]),
        (Reason::PROTOCOL_ERROR, frame::PUSH_PROMISE, 0, 1, &[0; 4]),
        (Reason::PROTOCOL_ERROR, frame::PRIORITY, 0, 0, &[0; 5]),
        (Reason::PROTOCOL_ERROR, frame::PRIORITY, 0, 9, &[0, 0, 0, 9, 0]),
        (Reason::FRAME_SIZE_ERROR, frame::PRIORITY, 0, 9, &[0; 4]),
        (
            Reason::PROTOCOL_ERROR,
            frame::HEADERS,
            WHOLE | frame::PRIORITY_FLAG,
            5,
            &[0, 0, 0, 5, 0, 0x83, 0x86, 0x84],
        ),
        (Reason::PROTOCOL_ERROR, frame::CONTINUATION, 0, 3, REQUEST),
        (Reason::PROTOCOL_ERROR, frame::SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]),
        (Reason::FLOW_CONTROL_ERROR, frame::WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]),
        (Reason::COMPRESSION_ERROR, frame::HEADERS, WHOLE, 5, &[0xff]),
    ];
    for (reason, kind, flags, stream, payload) in cases {
        let mut side = Side::server(9);
        let first = side.accept(1, REQUEST);
        side.send_response(first, true).unwrap();
        side.drop_call(first);
        let key = side.accept(3, REQUEST);
        side.sent();
        let violation = side.receive(kind, flags, stream, payload).unwrap_err();
        assert_eq!(violation.0, reason, "{kind} {stream} {violation}");
        side.core.go_away(violation);
        let sent = side.sent();
        assert_eq!((kinds(&sent), frame::be_u32(&sent[0].1)), (vec![frame::GOAWAY], 3));
        assert!(side.is_reset(key));
        side.drop_call(key);
        assert!(side.core.is_empty() && side.sent().is_empty());
    }
    // Partial and wrong prefaces.
    let mut core = Core::server(1);
    assert_eq!(core.recv(&PREFACE[..9]).unwrap(), 0);
    assert_eq!(core.recv(PREFACE).unwrap(), PREFACE.len());
    assert!(
        core.recv(&[0, 0, 8, frame::PING, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]).is_err(),
        "first frame is not SETTINGS"
    );
    assert!(Core::server(1).recv(b"GET / HTTP/1.1\r\n").is_err());
    assert_eq!(
        Side::server(1).core.recv(&[0, 64, 1, 0, 0, 0, 0, 0, 1]).unwrap_err().0,
        Reason::FRAME_SIZE_ERROR
    );
}

/// Verifies F19.
#[test]
fn pings_and_settings_are_acknowledged_within_the_output_limit() {
    for (kind, payload) in [(frame::PING, &[0; 8][..]), (frame::SETTINGS, &[])] {
        let mut side = Side::server(9);
        let read = (0..1_000_000)
            .take_while(|_| side.core.may_read() && side.receive(kind, 0, 0, payload).is_ok())
            .count();
        assert!(read < 200_000, "{read}");
        assert_eq!(side.sent().len(), read);
        assert!(side.core.may_read());
    }
    // RST_STREAM output is bounded too.
    let mut side = Side::server(0);
    let read = (0..1_000_000)
        .take_while(|n| {
            side.core.may_read() && side.receive(frame::HEADERS, WHOLE, 2 * n + 1, REQUEST).is_ok()
        })
        .count();
    assert!(read < 200_000, "{read}");
}

proptest! {
    /// Verifies F19.
    #[test]
    fn arbitrary_kubelet_frames_keep_all_properties(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        fuzzing::kubelet(&bytes);
    }
}
