//! Clients that exceed limits or leave requests incomplete.

use std::time::Duration;

use bytes::Bytes;
use kiyot::backends::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};
use tonic::Code;

use crate::{
    caller::{Caller, frame, soon},
    fake_runtime::FakeRuntime,
    server::Setup,
};

/// An unknown method.
const CONVERSE: &str = "/runtime.v1.RuntimeService/Converse";

/// Timeout that a test waits for. It is longer than a slow machine takes for a request.
pub(crate) const SHORT: Duration = Duration::from_secs(3);

/// Verifies F12.
#[tokio::test(flavor = "multi_thread")]
async fn incomplete_request_ends_at_the_client_timeout() {
    let server = Setup { client_timeout: SHORT, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    let parts = [&[][..], &[0, 0, 0, 0, 9], &[0, 0]];
    let calls = Method::ALL.iter().flat_map(|method| parts.map(|part| (method, part))).map(
        async |(method, part)| {
            let (response, mut stream) = caller.begin(method.path(), &[]).await;
            if !part.is_empty() {
                // The call may have ended.
                let _ = stream.send_data(Bytes::copy_from_slice(part), false);
            }
            let response = soon(response).await.unwrap();
            assert_eq!(
                response.headers()["grpc-status"],
                (Code::DeadlineExceeded as i32).to_string(),
                "{method}"
            );
        },
    );
    futures::future::join_all(calls).await;
}

/// Verifies F12.
#[tokio::test(flavor = "multi_thread")]
async fn connection_without_a_preface_or_with_half_a_frame_is_closed() {
    let server = Setup { client_timeout: SHORT, ..Setup::default() }.start();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0].as_slice();
    let half_frame = [0, 0, 40, 1].as_slice();
    let half_headers = [0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82].as_slice();
    for sent in [
        vec![],
        preface[..10].to_vec(),
        [preface, settings, half_frame].concat(),
        [preface, settings, half_headers].concat(),
    ] {
        let mut stream = UnixStream::connect(&server.running.address).await.unwrap();
        stream.write_all(&sent).await.unwrap();
        let mut rest = Vec::new();
        // An error is an end too: the server may have discarded bytes.
        let _ = soon(stream.read_to_end(&mut rest)).await;
    }
}

/// Verifies F12.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connection_between_calls_stays_open() {
    let server = Setup { client_timeout: SHORT, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    for _ in 0..2 {
        assert_eq!(caller.call(Method::Version, b"").await.ok(), b"answer to Version");
        tokio::time::sleep(2 * SHORT).await;
    }
    assert_eq!(caller.call(Method::Version, b"").await.ok(), b"answer to Version");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_stream_of_an_unknown_method_stays_open() {
    let server = Setup { client_timeout: SHORT, ..Setup::default() }.start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    let (response, mut stream) = caller.begin(CONVERSE, &[]).await;
    tokio::time::sleep(2 * SHORT).await;
    stream.send_data(frame(b"").into(), true).unwrap();
    assert_eq!(soon(response).await.unwrap().headers()["content-type"], "application/grpc");
}

/// Verifies F13.
#[tokio::test(flavor = "multi_thread")]
async fn calls_above_the_limit_are_refused() {
    let server = Setup { max_calls: 3, ..Setup::default() }.start();
    let (began, mut begins) = mpsc::unbounded_channel();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |call| {
        if call.head.uri.path() == CONVERSE {
            began.send(()).unwrap();
        }
        call.answer(b"")
    });
    // The limit applies to all connections together.
    let mut open = Vec::new();
    for _ in 0..3 {
        let caller = server.caller().await;
        open.push((caller.begin(CONVERSE, &[]).await, caller));
        soon(begins.recv()).await.unwrap();
    }
    let caller = server.caller().await;
    assert_eq!(caller.call(Method::Version, b"").await.code(), Code::ResourceExhausted as i32);
    open.clear();
    soon(async {
        while caller.call(Method::Version, b"").await.code() != 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Verifies F13.
#[tokio::test(flavor = "multi_thread")]
async fn headers_above_the_limit_are_refused() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    let fine = "x".repeat(500 << 10);
    assert_eq!(
        caller.raw(Method::Version.path(), &[("x-long", &fine)], frame(b"")).await.unwrap().code(),
        0
    );
    let long = "x".repeat(2 << 20);
    let refused = caller.raw(Method::Version.path(), &[("x-long", &long)], frame(b"")).await;
    assert!(
        refused.is_err()
            || refused.is_ok_and(|answer| answer
                .headers
                .get("grpc-status")
                .is_none_or(|status| status != "0"))
    );
    let other = Caller::connect(&server.running.address).await;
    assert_eq!(other.call(Method::Version, b"").await.code(), 0);
}
