//! Answers of container runtimes that break off, or are no list.

use std::sync::{Arc, Mutex};

use h2::Reason;
use http::{HeaderValue, Response};
use tonic::Code;

use crate::{
    caller::{Answer, frame, soon},
    lists::{LISTS, list, setup},
    played::{Call, Played, ok_trailers, read_all},
};

/// How an answer of a runtime ends that is no list.
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

/// Answers with a list of two pods, but for its end.
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

/// Whether a client takes this for a list.
fn is_a_list(answer: &Result<Answer, h2::Error>) -> bool {
    answer
        .as_ref()
        .is_ok_and(|answer| answer.metadata("grpc-status") == "0" && !answer.body.is_empty())
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_is_no_list() {
    for runtimes in [&["containerd"][..], &["containerd", "second"]] {
        let (door, caller) = setup(runtimes).await;
        let _others: Vec<_> = runtimes[..runtimes.len() - 1]
            .iter()
            .map(|name| Played::constant(&door.runtime(name), list(&["c"])))
            .collect();
        let end = Arc::new(Mutex::new(None));
        let wanted = end.clone();
        let runtime = Played::listen(&door.runtime(runtimes[runtimes.len() - 1]), move |call| {
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
        drop(runtime);
    }
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_is_lost_in_the_middle_of_a_list_makes_it_unavailable() {
    let (door, caller) = setup(&["containerd", "second"]).await;
    let _first = Played::constant(&door.containerd(), list(&["c"]));
    for method in LISTS {
        let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let second = Played::listen(&door.runtime("second"), move |mut call| {
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
            drop(second);
        };
        let (answer, ()) = tokio::join!(caller.call(method, b""), lost);
        assert_eq!(answer.code(), Code::Unavailable as i32, "{method}");
        assert!(answer.message().contains("second.sock"), "{}", answer.message());
    }
}
