//! What a container runtime may send, as any bytes. For kiyot-fuzz alone.

use std::{
    collections::HashMap,
    task::{Poll, Waker},
};

use bytes::Bytes;
use h2::Reason;
use http::{Request, request::Parts};

use super::{
    core::Core,
    error::Error,
    frame::{self, Head, MAX_PAYLOAD, PREFACE},
    hpack::Decoder,
    streams::Key,
};

/// What the windows allow at first, and what is allowed of all streams together. Bytes.
const FIRST_WINDOW: i64 = 65_535;

/// A caller's end of a stream.
struct Caller {
    key: Key,
    has_sending: bool,
    has_head: bool,
    gave_end: bool,
}

/// What a runtime would see of us, and has allowed.
struct Model {
    decoder: Decoder,
    block: Vec<u8>,
    last_id: u32,
    /// What may still be sent of data.
    window: i64,
    /// What each stream has sent, and whether it has ended.
    streams: HashMap<u32, (usize, bool)>,
    greeted: bool,
    /// What came and was not read: less than a frame.
    came: Vec<u8>,
}

impl Model {
    /// Reads what was sent, as far as it came.
    fn read(&mut self, more: &[u8]) {
        self.came.extend_from_slice(more);
        let came = std::mem::take(&mut self.came);
        let mut bytes = came.as_slice();
        if !self.greeted && bytes.len() >= PREFACE.len() {
            bytes = bytes.strip_prefix(PREFACE).unwrap_or_else(|| panic!("no preface"));
            self.greeted = true;
        }
        while self.greeted
            && let Some(head) = Head::read(bytes)
        {
            assert!(head.length <= MAX_PAYLOAD);
            let Some((payload, rest)) = bytes[frame::HEAD..].split_at_checked(head.length) else { break };
            bytes = rest;
            if !self.block.is_empty() {
                assert_eq!(head.kind, frame::CONTINUATION);
            }
            match head.kind {
                frame::HEADERS | frame::CONTINUATION => {
                    if head.kind == frame::HEADERS {
                        let ended = head.has(frame::END_STREAM);
                        if head.stream > self.last_id {
                            assert!(head.stream % 2 == 1);
                            self.last_id = head.stream;
                            self.streams.insert(head.stream, (0, ended));
                        } else {
                            let stream = self.streams.get_mut(&head.stream).unwrap_or_else(|| panic!("trailers of {}", head.stream));
                            assert!(ended && !std::mem::replace(&mut stream.1, true));
                        }
                    }
                    self.block.extend_from_slice(payload);
                    if head.has(frame::END_HEADERS) {
                        let block = std::mem::take(&mut self.block);
                        let mut fields = 0;
                        let read = self.decoder.read(&block, |field| {
                            assert!(field.is_fine);
                            fields += 1;
                        });
                        assert!(read.is_ok() && fields > 0, "{read:?}");
                    }
                }
                frame::DATA => {
                    self.window -= head.length as i64;
                    assert!(head.length == 0 || self.window >= 0, "more data than the window allows");
                    let stream = self.streams.get_mut(&head.stream).unwrap_or_else(|| panic!("data of {}", head.stream));
                    assert!(!stream.1, "data behind the end of {}", head.stream);
                    *stream = (stream.0 + head.length, head.has(frame::END_STREAM));
                }
                frame::RST_STREAM => assert!(self.streams.remove(&head.stream).is_some(), "a reset of {}", head.stream),
                _ => {}
            }
        }
        self.came = bytes.to_vec();
    }
}

fn head(number: usize) -> Parts {
    let request = Request::post(format!("http://localhost/runtime.v1.RuntimeService/Method{}", number % 3));
    let request = request.header("te", "trailers").header("grpc-timeout", format!("{number}S"));
    let long = if number % 5 == 4 { "x".repeat(40_000) } else { "short".into() };
    request.header("x-some", long).body(()).unwrap_or_else(|error| panic!("{error}")).into_parts().0
}

/// Does what the bytes say: callers begin calls, send, take and go, and the runtime sends frames, any and likely ones. What is sent must be what HTTP/2 allows, and
/// nothing may wait without a bound.
///
/// # Panics
/// If it isn't.
pub fn runtime(bytes: &[u8]) {
    let mut core = Core::new();
    let streams = HashMap::new();
    let mut model = Model { decoder: Decoder::new(), block: Vec::new(), last_id: 0, window: FIRST_WINDOW, streams, greeted: false, came: Vec::new() };
    let mut callers: Vec<Caller> = Vec::new();
    let mut begun = 0;
    let mut rest = bytes;
    let mut next = |most: usize| {
        let (taken, tail) = rest.split_at(most.min(rest.len()));
        rest = tail;
        taken
    };
    let mut ended = false;
    // Most begin as they must.
    if !bytes.len().is_multiple_of(8) {
        ended = receive(&mut core, &mut model, frame::SETTINGS, 0, 0, &[]);
    }
    while let &[op] = next(1) {
        let at = usize::from(op >> 4);
        match op & 0x0f {
            0 | 1 => {
                let length = next(1).first().map_or(0, |&length| usize::from(length) * 600);
                if callers.len() < 16 {
                    let is_all = op & 1 == 1;
                    if let Ok(key) = core.request(&head(begun), &vec![7; length].into(), is_all) {
                        callers.push(Caller { key, has_sending: true, has_head: false, gave_end: is_all });
                    }
                    begun += 1;
                }
            }
            2 if at < callers.len() => {
                let caller = callers.swap_remove(at);
                for _ in 0..=usize::from(caller.has_sending) {
                    core.let_go(caller.key);
                }
            }
            3 => {
                if let Some(caller) = callers.get_mut(at).filter(|caller| caller.has_sending) {
                    caller.has_sending = false;
                    core.let_go(caller.key);
                }
            }
            4 => {
                if let Some(caller) = callers.get_mut(at).filter(|caller| caller.has_sending && !caller.gave_end)
                    && let Poll::Ready(Ok(())) = core.poll_sent(caller.key, Waker::noop())
                {
                    core.give(caller.key, Bytes::from_static(&[9; 30_000]));
                }
            }
            5 => {
                if let Some(caller) = callers.get_mut(at).filter(|caller| caller.has_sending && !caller.gave_end) {
                    caller.gave_end = true;
                    core.give_end(caller.key, None);
                }
            }
            6 | 7 => {
                if let Some(caller) = callers.get_mut(at) {
                    if !caller.has_head {
                        caller.has_head = matches!(core.poll_head(caller.key, Waker::noop()), Poll::Ready(Ok(_)));
                    } else if let Poll::Ready(None) = core.poll_data(caller.key, Waker::noop()) {
                        let _ = core.poll_trailers(caller.key, Waker::noop());
                    }
                }
            }
            8 => {
                let output = core.output();
                let length = output.len().min(1 << at);
                model.read(&output[..length]);
                core.wrote(length);
            }
            _ if ended => {}
            kind => {
                let &[flags, stream, length] = next(3) else { break };
                // The likely ones, and any.
                let kind = match kind {
                    9 => frame::DATA,
                    10 => frame::HEADERS,
                    11 => frame::SETTINGS,
                    12 => frame::WINDOW_UPDATE,
                    13 => frame::CONTINUATION,
                    14 => frame::GOAWAY,
                    _ => stream,
                };
                let payload = next(usize::from(length)).to_vec();
                ended = receive(&mut core, &mut model, kind, flags, stream.into(), &payload);
            }
        }
        assert!(core.backlog() < 3 << 20, "{} bytes wait", core.backlog());
    }
    while !core.output().is_empty() {
        let length = core.output().len();
        model.read(core.output());
        core.wrote(length);
    }
    assert!(model.came.is_empty() && model.block.is_empty(), "half a frame was sent");
    core.end(&Error::Closed);
    for caller in callers {
        let data = core.poll_data(caller.key, Waker::noop());
        assert!(data.is_ready(), "a call waits for a connection that is no more");
        for _ in 0..=usize::from(caller.has_sending) {
            core.let_go(caller.key);
        }
    }
    assert!(core.is_empty());
}

fn receive(core: &mut Core, model: &mut Model, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> bool {
    let head = Head { length: payload.len(), kind, flags, stream };
    if !core.may_read() {
        return false;
    }
    if kind == frame::WINDOW_UPDATE && stream == 0 {
        model.window += i64::from(frame::number(payload) & frame::MAX_31);
    }
    match core.receive(head, payload) {
        Ok(()) => false,
        Err(violation) => {
            assert!(!violation.1.is_empty() && violation.0 != Reason::NO_ERROR);
            core.condemn(violation);
            true
        }
    }
}
