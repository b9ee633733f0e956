//! Truncated and invalid lists of container runtimes.

use std::sync::{Arc, Mutex};

use h2::Reason;
use http::{HeaderValue, Response};
use tonic::Code;

use crate::{
    caller::{Answer, frame, soon},
    fake_runtime::{Call, FakeRuntime, ok_trailers, read_all},
    lists::{LISTS, list, setup},
};

/// Ends of a response that make it invalid.
const ENDS: [&str; 11] = [
    "a reset before its message",
    "a reset in its message",
    "a reset behind its message",
    "an error behind its message",
    "no trailers",
    "half its message",
    "more than its message",
    "two messages",
    "no message",
    "a status alone",
    "no gRPC",
];

/// Answers with a list of two pods, and an invalid end.
async fn broken(mut call: Call, end: &str) {
    let _ = read_all(&mut call.body).await;
    let whole = frame(&list(&["a", "b"]));
    let head = || Response::builder().header("content-type", "application/grpc");
    if end == "a status alone" {
        call.respond
            .send_response(head().header("grpc-status", "0").body(()).unwrap(), true)
            .unwrap();
        return;
    }
    if end == "no gRPC" {
        call.respond
            .send_response(Response::builder().status(502).body(()).unwrap(), true)
            .unwrap();
        return;
    }
    let mut stream = call.respond.send_response(head().body(()).unwrap(), false).unwrap();
    let body = match end {
        "a reset before its message" | "no message" => Vec::new(),
        "a reset in its message" | "half its message" => whole[..whole.len() - 3].to_vec(),
        "more than its message" => [&whole[..], b"more"].concat(),
        "two messages" => [&whole[..], &whole[..]].concat(),
        _ => whole,
    };
    stream.send_data(body.into(), end == "no trailers").unwrap();
    let mut trailers = ok_trailers();
    match end {
        "no trailers" => {}
        _ if end.starts_with("a reset") => stream.send_reset(Reason::INTERNAL_ERROR),
        "an error behind its message" => {
            trailers.insert("grpc-status", HeaderValue::from_static("14"));
            stream.send_trailers(trailers).unwrap();
        }
        _ => stream.send_trailers(trailers).unwrap(),
    }
}

/// Returns whether a client accepts this as a list.
fn is_a_list(answer: &Result<Answer, h2::Error>) -> bool {
    answer
        .as_ref()
        .is_ok_and(|answer| answer.metadata("grpc-status") == "0" && !answer.body.is_empty())
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn truncated_or_reset_list_is_an_error() {
    for runtimes in [&["containerd"][..], &["containerd", "second"]] {
        let (server, caller) = setup(runtimes).await;
        let _others: Vec<_> = runtimes[..runtimes.len() - 1]
            .iter()
            .map(|name| FakeRuntime::constant(&server.runtime(name), list(&["c"])))
            .collect();
        let end = Arc::new(Mutex::new(None));
        let wanted = end.clone();
        let runtime =
            FakeRuntime::listen(&server.runtime(runtimes[runtimes.len() - 1]), move |call| {
                let end: Option<&str> = *wanted.lock().unwrap();
                async move {
                    match end {
                        None => call.answer(&list(&["a", "b"])).await,
                        Some(end) => broken(call, end).await,
                    }
                }
            });
        for method in LISTS {
            let asked = async || caller.raw(method.path(), &[], frame(b"")).await;
            *end.lock().unwrap() = None;
            assert!(is_a_list(&asked().await), "{method}");
            for how in ENDS {
                *end.lock().unwrap() = Some(how);
                let answer = asked().await;
                assert!(!is_a_list(&answer), "{method}, whose answer has {how}: {answer:?}");
            }
        }
        runtime.stop().await;
    }
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn connection_loss_during_a_list_is_unavailable() {
    let (server, caller) = setup(&["containerd", "second"]).await;
    let _first = FakeRuntime::constant(&server.containerd(), list(&["c"]));
    for method in LISTS {
        let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let second = FakeRuntime::listen(&server.runtime("second"), move |mut call| {
            let began = began.clone();
            async move {
                let _ = read_all(&mut call.body).await;
                let head = Response::builder()
                    .header("content-type", "application/grpc")
                    .body(())
                    .unwrap();
                let mut stream = call.respond.send_response(head, false).unwrap();
                let whole = frame(&list(&["a", "b"]));
                stream.send_data(whole[..whole.len() - 3].to_vec().into(), false).unwrap();
                began.send(()).unwrap();
                std::future::pending().await
            }
        });
        let lost = async {
            soon(begins.recv()).await.unwrap();
            second.stop().await;
        };
        let (answer, ()) = tokio::join!(caller.call(method, b""), lost);
        assert_eq!(answer.code(), Code::Unavailable as i32, "{method}");
        assert!(answer.message().contains("second.sock"), "{}", answer.message());
    }
}
