//! Clients that do too much, or stop in the middle.

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
    door::Setup,
    played::Played,
};

/// A method that nobody knows.
const CONVERSE: &str = "/runtime.v1.RuntimeService/Converse";

/// Short enough to wait for, and longer than a slow machine takes from a request's first bytes to
/// its last.
pub(crate) const SHORT: Duration = Duration::from_secs(3);

/// Verifies F12.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_sent_request_ends() {
    let door = Setup { client_timeout: SHORT, ..Setup::default() }.open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
    let parts = [&[][..], &[0, 0, 0, 0, 9], &[0, 0]];
    let calls = Method::ALL.iter().flat_map(|method| parts.map(|part| (method, part))).map(
        async |(method, part)| {
            let (response, mut stream) = caller.begin(method.path(), &[]).await;
            if !part.is_empty() {
                // Its time may be over.
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
async fn a_connection_that_sends_nothing_or_half_a_frame_ends() {
    let door = Setup { client_timeout: SHORT, ..Setup::default() }.open();
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
        let mut stream = UnixStream::connect(&door.bound.address).await.unwrap();
        stream.write_all(&sent).await.unwrap();
        let mut rest = Vec::new();
        // An error is an end as well: the other side may have thrown bytes away.
        let _ = soon(stream.read_to_end(&mut rest)).await;
    }
}

/// Verifies F12.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_idle_between_calls_stays() {
    let door = Setup { client_timeout: SHORT, ..Setup::default() }.open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
    for _ in 0..2 {
        assert_eq!(caller.call(Method::Version, b"").await.ok(), b"answer to Version");
        tokio::time::sleep(2 * SHORT).await;
    }
    assert_eq!(caller.call(Method::Version, b"").await.ok(), b"answer to Version");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_stream_of_an_unknown_method_stays() {
    let door = Setup { client_timeout: SHORT, ..Setup::default() }.open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
    let (response, mut stream) = caller.begin(CONVERSE, &[]).await;
    tokio::time::sleep(2 * SHORT).await;
    stream.send_data(frame(b"").into(), true).unwrap();
    assert_eq!(soon(response).await.unwrap().headers()["content-type"], "application/grpc");
}

/// Verifies F13.
#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_allowed_are_refused() {
    let door = Setup { max_calls: 3, ..Setup::default() }.open();
    let (began, mut begins) = mpsc::unbounded_channel();
    let _runtime = Played::listen(&door.containerd(), move |call| {
        if call.head.uri.path() == CONVERSE {
            began.send(()).unwrap();
        }
        call.answer(b"")
    });
    // The limit counts over all connections.
    let mut open = Vec::new();
    for _ in 0..3 {
        let caller = door.caller().await;
        open.push((caller.begin(CONVERSE, &[]).await, caller));
        soon(begins.recv()).await.unwrap();
    }
    let caller = door.caller().await;
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
async fn metadata_that_is_too_long_is_refused() {
    let door = Setup::default().open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
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
    let other = Caller::connect(&door.bound.address).await;
    assert_eq!(other.call(Method::Version, b"").await.code(), 0);
}
