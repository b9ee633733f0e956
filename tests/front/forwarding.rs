//! Forwarding without changes.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, request::Parts};
use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tokio::sync::mpsc;

use crate::{
    caller::{frame, soon},
    fake_runtime::{FakeRuntime, read_all},
    server::Setup,
};

fn metadata() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/grpc+proto"));
    headers.append("repeated", HeaderValue::from_static("one"));
    headers.append("repeated", HeaderValue::from_static("two"));
    headers.insert("some-bin", HeaderValue::from_static("AAECAw"));
    headers.insert("obs-text", HeaderValue::from_bytes(b"caf\xe9").unwrap());
    headers
}

fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("5"));
    trailers.insert("grpc-message", HeaderValue::from_static("no%20such%20thing"));
    trailers.insert("grpc-status-details-bin", HeaderValue::from_static("CAUSDW5vIHN1Y2ggdGhpbmc"));
    trailers.append("more", HeaderValue::from_static("a"));
    trailers.append("more", HeaderValue::from_static("b"));
    trailers
}

/// A method of the node, a method routed by id, and an unknown method.
const PATHS: [&str; 3] = [
    "/runtime.v1.RuntimeService/Version",
    "/runtime.v1.RuntimeService/StopPodSandbox",
    "/runtime.v9.RuntimeService/Levitate",
];

/// Verifies F1.
#[tokio::test(flavor = "multi_thread")]
async fn headers_bodies_and_trailers_arrive_unchanged() {
    let server = Setup::default().start();
    let seen = Arc::new(Mutex::new(Vec::<(Parts, Vec<u8>)>::new()));
    let record = seen.clone();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let record = record.clone();
        async move {
            let body = read_all(&mut call.body).await.unwrap();
            record.lock().unwrap().push((call.head, body));
            let mut response = Response::new(());
            *response.headers_mut() = metadata();
            let mut stream = call.respond.send_response(response, false).unwrap();
            stream.send_data(Bytes::from(frame(b"answer")), false).unwrap();
            stream.send_trailers(trailers()).unwrap();
        }
    });
    let caller = server.caller().await;
    for path in PATHS {
        let body = frame(b"\x0a\x03abc\x50\x07");
        let sent = [
            ("grpc-timeout", "100S"),
            ("x-repeated", "1"),
            ("x-repeated", "2"),
            ("trace-bin", "AAEC/w"),
            ("user-agent", "grpc-go/1.80.0"),
        ];
        let answer = caller.raw(path, &sent, body.clone()).await.unwrap();
        assert_eq!(answer.headers, metadata());
        assert_eq!(answer.body, frame(b"answer"));
        assert_eq!(answer.trailers, Some(trailers()));

        let (head, seen_body) = seen.lock().unwrap().pop().unwrap();
        assert_eq!(head.uri.path(), path);
        assert_eq!(head.uri.authority().unwrap(), "localhost");
        assert_eq!(head.uri.scheme_str(), Some("http"));
        assert_eq!(head.method, "POST");
        assert_eq!(seen_body, body);
        let mut expected = HeaderMap::new();
        expected.insert("content-type", HeaderValue::from_static("application/grpc"));
        expected.insert("te", HeaderValue::from_static("trailers"));
        for (name, value) in sent {
            expected.append(name, HeaderValue::from_static(value));
        }
        // On a slow machine the elapsed time may have been subtracted.
        let mut received = head.headers;
        received.remove("grpc-timeout").unwrap();
        expected.remove("grpc-timeout");
        assert_eq!(received, expected);
    }
}

/// Verifies F1.
#[tokio::test(flavor = "multi_thread")]
async fn trailers_only_response_stays_trailers_only() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        let mut response = Response::new(());
        *response.headers_mut() = trailers();
        call.respond.send_response(response, true).unwrap();
        let _ = read_all(&mut call.body).await;
    });
    let caller = server.caller().await;
    for path in PATHS {
        let answer = caller.raw(path, &[], frame(b"")).await.unwrap();
        assert_eq!((answer.headers, answer.body, answer.trailers), (trailers(), vec![], None));
    }
}

/// Verifies F2.
#[tokio::test(flavor = "multi_thread")]
async fn elapsed_time_is_subtracted_from_grpc_timeout() {
    let server = Setup::default().start();
    let (send, mut timeouts) = mpsc::unbounded_channel();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |call| {
        let timeout = call.head.headers["grpc-timeout"].to_str().unwrap().to_string();
        send.send(timeout).unwrap();
        async move { call.answer(b"").await }
    });
    let caller = server.caller().await;
    let body = Bytes::from(frame(b"\x0a\x03abc"));
    let mut timeout = async || {
        let (response, mut stream) =
            caller.begin(Method::StopPodSandbox.path(), &[("grpc-timeout", "100S")]).await;
        stream.send_data(body.slice(..4), false).unwrap();
        // The test measures time and waits for none.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        stream.send_data(body.slice(4..), true).unwrap();
        soon(response).await.unwrap();
        soon(timeouts.recv()).await.unwrap()
    };
    // On a slow machine both halves may arrive together.
    soon(async {
        loop {
            let timeout = timeout().await;
            let micros = timeout.strip_suffix('u').map(|micros| micros.parse::<u64>().unwrap());
            if micros.is_some_and(|micros| micros < 99_990_000) {
                break;
            }
        }
    })
    .await;
}

/// Verifies F3.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_sixteen_mebibytes_pass_both_ways() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        let body = read_all(&mut call.body).await.unwrap();
        let response =
            Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let mut stream = call.respond.send_response(response, false).unwrap();
        assert!(crate::fake_runtime::send_all(&mut stream, body.into()).await);
        stream.send_trailers(crate::fake_runtime::ok_trailers()).unwrap();
    });
    let caller = server.caller().await;
    for path in PATHS {
        let mut message: Vec<u8> = (0..16_u32 << 20).map(|n| (n ^ (n >> 8)) as u8).collect();
        // An unknown field of bytes.
        message[..5].copy_from_slice(&[0x7a, 0xfb, 0xff, 0xff, 0x07]);
        let body = frame(&message);
        let answer = caller.raw(path, &[], body.clone()).await.unwrap();
        assert!(answer.body == body, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn single_backend_gets_malformed_and_compressed_messages_unchanged() {
    let server = Setup { cells: false, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    for &method in Method::ALL {
        // Not protobuf, with the flag of a compressed message.
        let answer = caller.raw(method.path(), &[], vec![1, 0, 0, 0, 1, 0xff]).await.unwrap();
        assert_eq!(answer.ok(), format!("answer to {method}").as_bytes());
    }
}

/// Verifies F3.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_concurrent_calls_share_one_connection() {
    let server = Setup::default().start();
    let barrier = Arc::new(tokio::sync::Barrier::new(10_000));
    let runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let barrier = barrier.clone();
        async move {
            let body = read_all(&mut call.body).await.unwrap();
            // Answers wait until all calls have arrived.
            barrier.wait().await;
            let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
            stream.send_data(body.into(), false).unwrap();
            stream.send_trailers(crate::fake_runtime::ok_trailers()).unwrap();
        }
    });
    let callers = [server.caller().await, server.caller().await];
    let calls = (0..10_000_u32).map(|n| {
        let caller = callers[n as usize % 2].clone();
        let path = PATHS[n as usize % 3];
        async move {
            let message = [b"\x0a\x04", format!("{n:04}").as_bytes()].concat();
            assert_eq!(caller.raw(path, &[], frame(&message)).await.unwrap().ok(), message);
        }
    });
    soon(futures::future::join_all(calls)).await;
    assert_eq!(runtime.connections(), 1);
}

/// Forwarded calls, merged lists and calls of cells are open at once; each gets its own response.
///
/// Verifies F3.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_concurrent_calls_of_all_kinds_are_answered() {
    const CALLS: usize = 10_000;
    const KINDS: usize = 4;
    let server = Setup::default().start();
    let pods = |ids: &[&str]| {
        let items = ids
            .iter()
            .map(|id| cri::PodSandbox { id: id.to_string(), ..Default::default() })
            .collect();
        cri::ListPodSandboxResponse { items }.encode_to_vec()
    };
    for method in [Method::ListPodSandbox, Method::PodSandboxStatus] {
        server.cells.snapshots.lock().unwrap().insert(method, Ok(pods(&["milpa1"])));
    }
    // The runtime gets two calls in four, and answers when all have arrived.
    let barrier = Arc::new(tokio::sync::Barrier::new(CALLS / KINDS * 2));
    let list = pods(&["a", "b"]);
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let (barrier, list) = (barrier.clone(), list.clone());
        async move {
            let body = read_all(&mut call.body).await.unwrap();
            barrier.wait().await;
            let is_list = call.head.uri.path() == Method::ListPodSandbox.path();
            let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
            stream.send_data(if is_list { frame(&list) } else { body }.into(), false).unwrap();
            stream.send_trailers(crate::fake_runtime::ok_trailers()).unwrap();
        }
    });
    let callers = [server.caller().await, server.caller().await];
    let whole = pods(&["a", "b", "milpa1"]);
    let (whole, ours) = (&whole, &pods(&["milpa1"]));
    let calls = (0..CALLS).map(|n| {
        let caller = callers[n % 2].clone();
        async move {
            let asked = |id: &str| {
                cri::ExecSyncRequest {
                    container_id: id.into(),
                    cmd: vec![n.to_string()],
                    timeout: 0,
                }
                .encode_to_vec()
            };
            match n / 2 % KINDS {
                0 => assert_eq!(caller.call(Method::ListPodSandbox, b"").await.ok(), whole),
                1 => assert_eq!(
                    caller.call(Method::ExecSync, &asked("abc")).await.ok(),
                    asked("abc")
                ),
                2 => assert_eq!(
                    caller.call(Method::ExecSync, &asked("milpa-echo")).await.ok(),
                    asked("milpa-echo")
                ),
                _ => assert_eq!(
                    caller.call(Method::PodSandboxStatus, &asked("milpa1")).await.ok(),
                    ours
                ),
            }
        }
    });
    soon(futures::future::join_all(calls)).await;
}
