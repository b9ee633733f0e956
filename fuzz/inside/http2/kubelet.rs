//! Server whose client, a kubelet, sends arbitrary frames.

use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};

use super::{
    model::{Model, receive},
    script::Script,
};
use crate::{Reason, core::Core, error::Error, frame, streams::Key};

/// Concurrent streams that the server allows.
const MAX_STREAMS: u32 = 12;

/// Accepted stream.
struct Call {
    key: Key,
    has_body: bool,
    gave_head: bool,
    gave_end: bool,
}

fn trailers(number: usize) -> HeaderMap {
    let long = if number % 5 == 4 { "x".repeat(40_000) } else { "short".into() };
    let value = HeaderValue::try_from(long).unwrap_or_else(|error| panic!("{error}"));
    [(http::header::SERVER, value), (http::header::AGE, HeaderValue::from(number))]
        .into_iter()
        .collect()
}

/// Interprets bytes as a script: a kubelet sends arbitrary and likely frames, and the server reads,
/// answers, resets and drops its requests. The output must follow HTTP/2, and streams and buffers
/// must keep their bounds.
///
/// # Panics
/// If the output violates HTTP/2, or a stream or buffer exceeds its bound.
pub fn kubelet(bytes: &[u8]) {
    let mut core = Core::server(MAX_STREAMS);
    let mut model = Model::server();
    let mut calls: Vec<Call> = Vec::new();
    let (mut script, mut ended) = Script::begin(bytes, &mut core, &mut model);
    let cx = Context::from_waker(Waker::noop());
    while let &[op] = script.take(1) {
        let at = usize::from(op >> 4);
        match op & 0x0f {
            0 => core.graceful_shutdown(),
            1 => {
                if let Some(call) = calls.get_mut(at).filter(|call| !call.gave_head) {
                    call.gave_head = true;
                    call.gave_end = at % 4 == 3;
                    let mut head = Response::new(());
                    *head.headers_mut() = trailers(at);
                    let gone = core.poll_reset(call.key, &cx).is_ready();
                    let responded =
                        core.send_response(call.key, &head.into_parts().0, call.gave_end);
                    assert!(responded.is_err() || !gone, "a response on a reset stream");
                }
            }
            2 => {
                if let Some(call) =
                    calls.get_mut(at).filter(|call| call.gave_head && !call.gave_end)
                    && let Poll::Ready(Ok(())) = core.poll_ready(call.key, Waker::noop())
                {
                    core.send_data(call.key, Bytes::from_static(&[9; 30_000]));
                }
            }
            3 => {
                if let Some(call) =
                    calls.get_mut(at).filter(|call| call.gave_head && !call.gave_end)
                {
                    call.gave_end = true;
                    core.finish(call.key, (at % 2 == 0).then(|| trailers(at)));
                }
            }
            4 => {
                if let Some(call) = calls.get_mut(at).filter(|call| call.has_body)
                    && let Poll::Ready(None) = core.poll_data(call.key, Waker::noop())
                {
                    let _ = core.poll_trailers(call.key, Waker::noop());
                }
            }
            5 => {
                if let Some(call) = calls.get_mut(at).filter(|call| call.has_body) {
                    call.has_body = false;
                    core.discard_recv(call.key);
                    core.drop_stream_ref(call.key);
                }
            }
            6 if at < calls.len() => {
                let call = calls.swap_remove(at);
                for _ in 0..=usize::from(call.has_body) {
                    core.drop_stream_ref(call.key);
                }
            }
            7 => {
                if let Some(call) = calls.get_mut(at) {
                    call.gave_head = true;
                    call.gave_end = true;
                    core.send_reset(call.key, Reason::CANCEL, Error::Aborted);
                }
            }
            8 => model.read_some(&mut core, 1 << at),
            _ if ended => {}
            kind => {
                let &[flags, stream, length] = script.take(3) else { break };
                // Likely types, and arbitrary ones.
                let (kind, stream) = match kind {
                    9 => (frame::DATA, stream),
                    10 => (frame::HEADERS, stream),
                    11 => (frame::SETTINGS, stream),
                    12 => (frame::WINDOW_UPDATE, stream),
                    13 => (frame::CONTINUATION, stream),
                    14 => (frame::RST_STREAM, stream),
                    _ => (stream, 0),
                };
                let payload = script.take(usize::from(length)).to_vec();
                ended = receive(&mut core, &mut model, kind, flags, stream.into(), &payload);
                while let Some((key, request)) = core.accept() {
                    assert!(
                        request.uri().path().starts_with('/') || request.uri().path() == "*",
                        "{request:?}"
                    );
                    calls.push(Call { key, has_body: true, gave_head: false, gave_end: false });
                }
                assert!(core.open_streams() <= MAX_STREAMS as usize);
            }
        }
        assert!(core.backlog() < 3 << 20, "{} bytes wait", core.backlog());
    }
    model.read_all(&mut core);
    core.close(&Error::Closed);
    for call in calls {
        assert!(
            core.poll_reset(call.key, &cx).is_ready() || call.gave_end,
            "a caller waits for an ended connection"
        );
        assert!(
            !call.has_body || core.poll_data(call.key, Waker::noop()).is_ready(),
            "a caller waits for an ended connection"
        );
        for _ in 0..=usize::from(call.has_body) {
            core.drop_stream_ref(call.key);
        }
    }
    assert!(core.is_empty());
}
