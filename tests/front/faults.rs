//! Container runtimes that are down, restart, hang or hang up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::Reason;
use http::Response;
use kiyot::backends::Method;
use tokio::net::UnixListener;
use tonic::Code;

use crate::{caller::soon, fake_runtime::FakeRuntime, server::Setup};

/// Verifies F11.
#[tokio::test(flavor = "multi_thread")]
async fn absent_runtime_is_unavailable_with_its_socket_in_the_error() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    for method in [Method::Version, Method::StopPodSandbox, Method::Status, Method::RunPodSandbox] {
        let answer = caller.call(method, b"\x0a\x00").await;
        assert_eq!(answer.code(), Code::Unavailable as i32);
        let message = answer.message();
        assert!(
            message.contains(server.containerd().to_str().unwrap())
                && message.contains("No such file"),
            "{message}"
        );
    }
}

/// Verifies F11.
#[tokio::test(flavor = "multi_thread")]
async fn restarted_runtime_is_reconnected() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    for round in 0..5 {
        let runtime = FakeRuntime::constant(&server.containerd(), format!("round {round}").into());
        // The call that uses the old connection may notice its loss.
        let answer = soon(async {
            loop {
                let answer = caller.call(Method::Version, b"").await;
                if answer.code() == 0 {
                    return answer;
                }
                assert_eq!(answer.code(), Code::Unavailable as i32);
            }
        })
        .await;
        assert_eq!(answer.ok(), format!("round {round}").as_bytes());
        runtime.stop().await;
    }
}

/// Verifies F11.
#[tokio::test(flavor = "multi_thread")]
async fn runtime_without_a_preface_is_unavailable() {
    let server = Setup { connect_timeout: Duration::from_millis(50), ..Setup::default() }.start();
    let _silent = UnixListener::bind(server.containerd()).unwrap();
    let caller = server.caller().await;
    let calls = (0..20).map(|_| caller.call(Method::Version, b""));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(answer.code(), Code::Unavailable as i32);
        assert!(answer.message().contains("within 50ms"), "{}", answer.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runtime_that_does_not_speak_http2_is_unavailable() {
    let server = Setup::default().start();
    let listener = UnixListener::bind(server.containerd()).unwrap();
    let _task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream
                .try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n and more that is not HTTP/2 at all");
        }
    }));
    let caller = server.caller().await;
    let answer = caller.call(Method::Version, b"").await;
    assert_eq!(answer.code(), Code::Unavailable as i32);
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_loss_ends_open_calls_as_unavailable() {
    let server = Setup::default().start();
    let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let began = began.clone();
        async move {
            let mut stream = None;
            if call.head.headers.contains_key("late") {
                let mut begun = call.respond.send_response(Response::new(()), false).unwrap();
                begun.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
                stream = Some(begun);
            }
            began.send(()).unwrap();
            std::future::pending::<()>().await;
            drop(stream);
        }
    });
    let caller = server.caller().await;
    let mut calls = Vec::new();
    for metadata in [&[][..], &[("late", "yes")]] {
        let (response, mut stream) = caller.begin(Method::Version.path(), metadata).await;
        stream.send_data(Bytes::from_static(&[0; 5]), true).unwrap();
        soon(begins.recv()).await.unwrap();
        calls.push((response, stream));
    }
    // The response that has begun is received.
    let (late, _stream) = calls.pop().unwrap();
    let (head, mut body) = soon(late).await.unwrap().into_parts();
    drop(runtime);
    let late = soon(crate::caller::collect(head.headers, &mut body)).await.unwrap();
    assert_eq!((late.code(), late.body), (Code::Unavailable as i32, vec![0; 5]));
    let (early, _stream) = calls.pop().unwrap();
    let early = soon(early).await.unwrap();
    assert_eq!(early.headers()["grpc-status"], "14");
}

/// REFUSED_STREAM: the runtime has not processed the call.
///
/// Verifies F20.
#[tokio::test(flavor = "multi_thread")]
async fn refused_call_is_retried_once() {
    let server = Setup::default().start();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let n = count.fetch_add(1, Ordering::SeqCst);
        async move {
            if n < 1 || call.head.headers.contains_key("always") {
                call.respond.send_reset(Reason::REFUSED_STREAM);
            } else {
                call.answer(b"at last").await;
            }
        }
    });
    let caller = server.caller().await;
    assert_eq!(caller.call(Method::Version, b"").await.ok(), b"at last");
    assert_eq!(seen.load(Ordering::SeqCst), 2);
    let body = crate::caller::frame(b"");
    let error = caller.raw(Method::Version.path(), &[("always", "yes")], body).await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM));
    assert_eq!(seen.load(Ordering::SeqCst), 4);
}

/// The part of the request that arrives after the refusal is not lost.
///
/// Verifies F20.
#[tokio::test(flavor = "multi_thread")]
async fn call_refused_before_its_request_is_complete_is_retried_whole() {
    let server = Setup::default().start();
    let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let seen = AtomicUsize::new(0);
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let (began, is_refused) =
            (began.clone(), seen.fetch_add(1, Ordering::SeqCst).is_multiple_of(2));
        async move {
            if is_refused {
                call.respond.send_reset(Reason::REFUSED_STREAM);
            }
            began.send(()).unwrap();
            if !is_refused {
                let body = crate::fake_runtime::read_all(&mut call.body).await.unwrap();
                let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
                stream.send_data(body.into(), false).unwrap();
                stream.send_trailers(crate::fake_runtime::ok_trailers()).unwrap();
            }
        }
    });
    let caller = server.caller().await;
    // An unknown method is forwarded before its body arrives. A known method is forwarded when its
    // message is complete, before its end.
    for (path, body) in [
        ("/runtime.v9.RuntimeService/Levitate", vec![]),
        (Method::Version.path(), crate::caller::frame(b"first")),
    ] {
        let (response, mut stream) = caller.begin(path, &[]).await;
        if !body.is_empty() {
            stream.send_data(Bytes::from(body.clone()), false).unwrap();
        }
        for _ in 0..2 {
            soon(begins.recv()).await.unwrap();
        }
        stream.send_data(Bytes::from_static(b" and second"), true).unwrap();
        let (head, mut received) = soon(response).await.unwrap().into_parts();
        let answer = soon(crate::caller::collect(head.headers, &mut received)).await.unwrap();
        assert_eq!(
            (answer.code(), answer.body),
            (0, [&body[..], b" and second"].concat()),
            "{path}"
        );
    }
}

/// After GOAWAY open calls go on.
///
/// Verifies F20.
#[tokio::test(flavor = "multi_thread")]
async fn goaway_moves_new_calls_to_a_new_connection() {
    let server = Setup::default().start();
    let listener = UnixListener::bind(server.containerd()).unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    let _task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(async move {
        let mut tasks = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            tasks.spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                let mut calls = tokio::task::JoinSet::new();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    let (head, body) = request.into_parts();
                    // A connection for each call.
                    connection.graceful_shutdown();
                    calls.spawn(crate::fake_runtime::Call { head, body, respond }.answer(b"done"));
                }
                calls.join_all().await;
            });
        }
    }));
    let caller = server.caller().await;
    for _ in 0..10 {
        assert_eq!(caller.call(Method::Version, b"").await.ok(), b"done");
    }
    assert!(connections.load(Ordering::SeqCst) >= 2);
}
