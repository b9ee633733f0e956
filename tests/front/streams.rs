//! Streams, cancellation and flow control.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use h2::Reason;
use http::Response;
use kiyot::backends::Method;
use kiyot_testkit::wait_until;
use tokio::sync::mpsc;

use crate::{
    caller::{LONG, frame, soon},
    fake_runtime::{FakeRuntime, ok_trailers, send_all},
    server::Setup,
};

const UNKNOWN: &str = "/runtime.v1.RuntimeService/Converse";

/// Verifies F3.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_bidirectional_stream_pass_at_once() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
        while let Some(part) = call.body.data().await {
            stream.send_data(part.unwrap(), false).unwrap();
        }
        stream.send_trailers(ok_trailers()).unwrap();
    });
    let caller = server.caller().await;
    let (response, mut send) = caller.begin(UNKNOWN, &[]).await;
    let mut body = soon(response).await.unwrap().into_body();
    for n in 0..20_u8 {
        let message = Bytes::from(frame(&[n; 100]));
        send.send_data(message.clone(), false).unwrap();
        let mut received = Vec::new();
        while received.len() < message.len() {
            received.extend_from_slice(&soon(body.data()).await.unwrap().unwrap());
        }
        assert_eq!(received, message);
    }
    send.send_data(Bytes::new(), true).unwrap();
    assert!(soon(body.data()).await.is_none_or(|part| part.unwrap().is_empty()));
    assert_eq!(soon(body.trailers()).await.unwrap().unwrap()["grpc-status"], "0");
}

/// Verifies F2.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_call_is_cancelled_at_the_runtime() {
    let server = Setup::default().start();
    let (began, mut begins) = mpsc::unbounded_channel();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let (began, ended) = (began.clone(), ended.clone());
        async move {
            let answers_at_once = call.head.headers.contains_key("at-once");
            let reason = if answers_at_once {
                let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
                began.send(()).unwrap();
                std::future::poll_fn(|cx| stream.poll_reset(cx)).await
            } else {
                began.send(()).unwrap();
                std::future::poll_fn(|cx| call.respond.poll_reset(cx)).await
            };
            ended.send(reason.unwrap()).unwrap();
        }
    });
    let caller = server.caller().await;
    for path in
        [Method::Version.path(), Method::ExecSync.path(), Method::ListPodSandbox.path(), UNKNOWN]
    {
        for metadata in [&[][..], &[("at-once", "yes")]] {
            if path == Method::ListPodSandbox.path() {
                server
                    .cells
                    .snapshots
                    .lock()
                    .unwrap()
                    .insert(Method::ListPodSandbox, Ok(vec![0x0a, 0]));
            }
            let (response, mut stream) = caller.begin(path, metadata).await;
            stream.send_data(frame(b"\x0a\x01x").into(), true).unwrap();
            soon(begins.recv()).await.unwrap();
            stream.send_reset(Reason::CANCEL);
            assert_eq!(soon(ends.recv()).await, Some(Reason::CANCEL), "{path} {metadata:?}");
            drop(response);
        }
    }
    // The end of a caller's connection cancels all its calls.
    let (response, mut stream) = caller.begin(Method::Version.path(), &[]).await;
    stream.send_data(frame(b"").into(), true).unwrap();
    soon(begins.recv()).await.unwrap();
    drop((response, stream, caller));
    assert_eq!(soon(ends.recv()).await, Some(Reason::CANCEL));
}

/// Calls that are sent to several backends.
///
/// Verifies F2.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_fan_out_ends_at_all_runtimes() {
    let server = Setup { runtimes: &["containerd", "second"], ..Setup::default() }.start();
    let (began, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let silent = |name: &str| {
        let (began, ended) = (began.clone(), ended.clone());
        FakeRuntime::listen(&server.runtime(name), move |mut call| {
            let (began, ended) = (began.clone(), ended.clone());
            async move {
                began.fetch_add(1, Ordering::SeqCst);
                let _ = std::future::poll_fn(|cx| call.respond.poll_reset(cx)).await;
                ended.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let _runtimes = [silent("containerd"), silent("second")];
    let caller = server.caller().await;
    let of_all = [
        Method::ListPodSandbox,
        Method::ListContainers,
        Method::ListContainerStats,
        Method::ListPodSandboxStats,
    ];
    for method in of_all {
        server.cells.snapshots.lock().unwrap().insert(method, Ok(vec![]));
    }
    let until = async |holds: &dyn Fn() -> bool| {
        wait_until("the runtimes' calls", LONG, async || holds().then_some(())).await
    };
    let of_node = [Method::Status, Method::ImageStatus, Method::ListPodSandboxMetrics];
    for (method, asked) in
        of_all.map(|method| (method, 2)).into_iter().chain(of_node.map(|method| (method, 1)))
    {
        let answer =
            soon(caller.raw(method.path(), &[("grpc-timeout", "50m")], frame(b""))).await.unwrap();
        assert_eq!(answer.code(), tonic::Code::DeadlineExceeded as i32, "{method}");
        until(&|| began.load(Ordering::SeqCst) == ended.load(Ordering::SeqCst)).await;

        let before = began.load(Ordering::SeqCst);
        let (response, mut stream) = caller.begin(method.path(), &[]).await;
        stream.send_data(frame(b"").into(), true).unwrap();
        until(&|| began.load(Ordering::SeqCst) >= before + asked).await;
        stream.send_reset(Reason::CANCEL);
        until(&|| began.load(Ordering::SeqCst) == ended.load(Ordering::SeqCst)).await;
        drop(response);
    }
}

/// Verifies F2.
#[tokio::test(flavor = "multi_thread")]
async fn reset_of_a_runtime_keeps_its_code() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        if call.head.headers.contains_key("late") {
            let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
            stream.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
            stream.send_reset(Reason::ENHANCE_YOUR_CALM);
        } else {
            call.respond.send_reset(Reason::ENHANCE_YOUR_CALM);
        }
    });
    let caller = server.caller().await;
    for metadata in [&[][..], &[("late", "yes")]] {
        let error = caller.raw(Method::Version.path(), metadata, frame(b"")).await.unwrap_err();
        assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM), "{error:?}");
    }
}

/// Sends 48 MiB to a counting caller. The data in flight is bounded by windows and buffers.
#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_slows_the_sender() {
    const TOTAL: usize = 48 << 20;
    const ON_THE_WAY: usize = 8 << 20;
    let server = Setup::default().start();
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let count = count.clone();
        async move {
            let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
            let part = Bytes::from(vec![0; 16 << 10]);
            for _ in 0..TOTAL / part.len() {
                assert!(send_all(&mut stream, part.clone()).await);
                count.fetch_add(part.len(), Ordering::SeqCst);
            }
            stream.send_trailers(ok_trailers()).unwrap();
        }
    });
    let caller = server.caller().await;
    let (response, mut stream) = caller.begin(UNKNOWN, &[]).await;
    stream.send_data(Bytes::new(), true).unwrap();
    let mut body = soon(response).await.unwrap().into_body();
    let mut received = 0;
    while let Some(part) = soon(body.data()).await {
        let part = part.unwrap();
        received += part.len();
        tokio::task::yield_now().await;
        let ahead = sent.load(Ordering::SeqCst).saturating_sub(received);
        assert!(ahead <= ON_THE_WAY, "{ahead}");
        body.flow_control().release_capacity(part.len()).unwrap();
    }
    assert_eq!(received, TOTAL);
}

/// A caller leaves a response unread on a connection that others use.
///
/// Verifies F3.
#[tokio::test(flavor = "multi_thread")]
async fn unread_response_does_not_block_other_calls() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        if call.head.uri.path() != UNKNOWN {
            return call.answer(b"here").await;
        }
        let mut stream = call.respond.send_response(Response::new(()), false).unwrap();
        while send_all(&mut stream, Bytes::from(vec![0; 16 << 10])).await {}
    });
    let caller = server.caller().await;
    let mut unread = Vec::new();
    for _ in 0..20 {
        let (response, mut stream) = caller.begin(UNKNOWN, &[]).await;
        stream.send_data(Bytes::new(), true).unwrap();
        unread.push(soon(response).await.unwrap());
    }
    for _ in 0..20 {
        assert_eq!(caller.call(Method::Version, b"").await.ok(), b"here");
    }
}
