//! Client whose server, a container runtime, sends arbitrary frames.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{Request, request::Parts};

use super::{
    model::{Model, receive},
    script::Script,
};
use crate::{core::Core, error::Error, frame, streams::Key};

/// Stream of a request.
struct Caller {
    key: Key,
    has_sending: bool,
    has_head: bool,
    gave_end: bool,
}

fn head(number: usize) -> Parts {
    let request =
        Request::post(format!("http://localhost/runtime.v1.RuntimeService/Method{}", number % 3));
    let request = request.header("te", "trailers").header("grpc-timeout", format!("{number}S"));
    let long = if number % 5 == 4 { "x".repeat(40_000) } else { "short".into() };
    request.header("x-some", long).body(()).unwrap_or_else(|error| panic!("{error}")).into_parts().0
}

/// Interprets bytes as a script: requests are begun, sent, read and cancelled, and the runtime
/// sends arbitrary and likely frames. The output must follow HTTP/2, and buffers must keep their
/// bounds.
///
/// # Panics
/// If the output violates HTTP/2, or a buffer exceeds its bound.
pub fn runtime(bytes: &[u8]) {
    let mut core = Core::client();
    let mut model = Model::client();
    let mut callers: Vec<Caller> = Vec::new();
    let mut begun = 0;
    let (mut script, mut ended) = Script::begin(bytes, &mut core, &mut model);
    while let &[op] = script.take(1) {
        let at = usize::from(op >> 4);
        match op & 0x0f {
            0 | 1 => {
                let length = script.take(1).first().map_or(0, |&length| usize::from(length) * 600);
                if callers.len() < 16 {
                    let is_all = op & 1 == 1;
                    if let Ok(key) =
                        core.send_request(&head(begun), &vec![7; length].into(), is_all)
                    {
                        callers.push(Caller {
                            key,
                            has_sending: true,
                            has_head: false,
                            gave_end: is_all,
                        });
                    }
                    begun += 1;
                }
            }
            2 if at < callers.len() => {
                let caller = callers.swap_remove(at);
                for _ in 0..=usize::from(caller.has_sending) {
                    core.drop_stream_ref(caller.key);
                }
            }
            3 => {
                if let Some(caller) = callers.get_mut(at).filter(|caller| caller.has_sending) {
                    caller.has_sending = false;
                    core.drop_stream_ref(caller.key);
                }
            }
            4 => {
                if let Some(caller) =
                    callers.get_mut(at).filter(|caller| caller.has_sending && !caller.gave_end)
                    && let Poll::Ready(Ok(())) = core.poll_ready(caller.key, Waker::noop())
                {
                    core.send_data(caller.key, Bytes::from_static(&[9; 30_000]));
                }
            }
            5 => {
                if let Some(caller) =
                    callers.get_mut(at).filter(|caller| caller.has_sending && !caller.gave_end)
                {
                    caller.gave_end = true;
                    core.finish(caller.key, None);
                }
            }
            6 | 7 => {
                if let Some(caller) = callers.get_mut(at) {
                    if !caller.has_head {
                        caller.has_head = matches!(
                            core.poll_response(caller.key, Waker::noop()),
                            Poll::Ready(Ok(_))
                        );
                    } else if let Poll::Ready(None) = core.poll_data(caller.key, Waker::noop()) {
                        let _ = core.poll_trailers(caller.key, Waker::noop());
                    }
                }
            }
            8 => model.read_some(&mut core, 1 << at),
            _ if ended => {}
            kind => {
                let &[flags, stream, length] = script.take(3) else { break };
                // Likely types, and arbitrary ones.
                let kind = match kind {
                    9 => frame::DATA,
                    10 => frame::HEADERS,
                    11 => frame::SETTINGS,
                    12 => frame::WINDOW_UPDATE,
                    13 => frame::CONTINUATION,
                    14 => frame::GOAWAY,
                    _ => stream,
                };
                let payload = script.take(usize::from(length)).to_vec();
                ended = receive(&mut core, &mut model, kind, flags, stream.into(), &payload);
            }
        }
        assert!(core.backlog() < 3 << 20, "{} bytes wait", core.backlog());
    }
    model.read_all(&mut core);
    core.close(&Error::Closed);
    for caller in callers {
        let data = core.poll_data(caller.key, Waker::noop());
        assert!(data.is_ready(), "a caller waits for an ended connection");
        for _ in 0..=usize::from(caller.has_sending) {
            core.drop_stream_ref(caller.key);
        }
    }
    assert!(core.is_empty());
}
