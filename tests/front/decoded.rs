//! Calls to a decoded backend, and their routing.

use std::{collections::HashMap, sync::atomic::Ordering};

use bytes::Bytes;
use h2::Reason;
use kiyot::backends::Method;
use kiyot_config::{Routing, Rule};
use kiyot_proto::cri;
use kiyot_testkit::wait_until;
use prost::Message;
use tonic::Code;

use crate::{
    caller::{LONG, frame, soon},
    fake_cells::HANGS,
    fake_runtime::FakeRuntime,
    server::Setup,
};

fn id(id: &str) -> Vec<u8> {
    cri::StopPodSandboxRequest { pod_sandbox_id: id.into() }.encode_to_vec()
}

/// Verifies F4.
#[tokio::test(flavor = "multi_thread")]
async fn call_is_routed_by_its_id() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    for &method in Method::ALL.iter().filter(|&&method| {
        matches!(kiyot::proxy::methods::route(method), kiyot::proxy::methods::Route::ById(_))
    }) {
        assert_eq!(
            caller.call(method, &id("milpa0123")).await.ok(),
            format!("cells: {method}").as_bytes()
        );
        for other in ["0123abcd", "", "mi1pa"] {
            assert_eq!(
                caller.call(method, &id(other)).await.ok(),
                format!("answer to {method}").as_bytes()
            );
        }
        // Malformed messages go to the node.
        assert_eq!(
            caller.call(method, &[0xff; 20]).await.ok(),
            format!("answer to {method}").as_bytes()
        );
    }
    // An empty body, and half a message.
    assert_eq!(caller.raw(Method::Exec.path(), &[], vec![]).await.unwrap().ok(), b"answer to Exec");
    assert_eq!(
        caller.raw(Method::Exec.path(), &[], vec![0, 0, 0, 0, 9, 1]).await.unwrap().ok(),
        b"answer to Exec"
    );
}

/// Verifies F6.
#[tokio::test(flavor = "multi_thread")]
async fn calls_of_cells_succeed_while_the_runtime_is_down() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    assert_eq!(
        caller.call(Method::StopContainer, &id("milpa1")).await.ok(),
        b"cells: StopContainer"
    );
    let filter = cri::PodSandboxFilter { id: "milpa1".into(), ..Default::default() };
    let list = cri::ListPodSandboxRequest { filter: Some(filter) }.encode_to_vec();
    assert_eq!(caller.call(Method::ListPodSandbox, &list).await.ok(), b"cells: ListPodSandbox");
}

/// Verifies F4.
#[tokio::test(flavor = "multi_thread")]
async fn pod_is_routed_by_annotation_and_handler_or_refused() {
    let rule = Rule {
        name: "batch".into(),
        namespace: vec!["batch-*".into()],
        backend: "cells".into(),
        ..Rule::default()
    };
    let server = Setup {
        routing: Routing { default: "containerd".into(), rules: vec![rule] },
        ..Setup::default()
    }
    .start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    let run = |namespace: &str, annotation: Option<&str>, handler: &str| {
        let metadata =
            Some(cri::PodSandboxMetadata { namespace: namespace.into(), ..Default::default() });
        let annotations: HashMap<_, _> = annotation
            .map(|value| ("kubernetes.io/target-runtime".into(), value.into()))
            .into_iter()
            .collect();
        let config = cri::PodSandboxConfig { metadata, annotations, ..Default::default() };
        cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.into() }
            .encode_to_vec()
    };
    let (cells, node) = (b"cells: RunPodSandbox".as_slice(), b"answer to RunPodSandbox".as_slice());
    assert_eq!(caller.call(Method::RunPodSandbox, &run("default", None, "")).await.ok(), node);
    assert_eq!(caller.call(Method::RunPodSandbox, &run("default", None, "runc")).await.ok(), node);
    assert_eq!(
        caller.call(Method::RunPodSandbox, &run("default", Some("kiyot"), "")).await.ok(),
        cells
    );
    assert_eq!(
        caller.call(Method::RunPodSandbox, &run("default", None, "kiyot")).await.ok(),
        cells
    );
    assert_eq!(caller.call(Method::RunPodSandbox, &run("batch-1", None, "")).await.ok(), cells);
    let refused = caller.call(Method::RunPodSandbox, &run("batch-1", Some("vm"), "")).await;
    assert_eq!(refused.code(), Code::InvalidArgument as i32);
    assert_eq!(
        refused.message(),
        r#"annotation kubernetes.io/target-runtime has the value "vm"; allowed is "kiyot""#
    );
}

/// Verifies R1.
#[tokio::test(flavor = "multi_thread")]
async fn pod_that_stays_on_the_node_is_sent_without_the_handler_of_cells() {
    let server = Setup::default().start();
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let sender = sender.clone();
        async move {
            sender.send(crate::fake_runtime::read_all(&mut call.body).await.unwrap()).unwrap();
            call.answer(b"sent").await;
        }
    });
    let caller = server.caller().await;
    let labels = [("stays".to_owned(), String::new())].into();
    let config = cri::PodSandboxConfig { labels, hostname: "h".to_owned(), ..Default::default() };
    let run = cri::RunPodSandboxRequest {
        config: Some(config.clone()),
        runtime_handler: "kiyot".to_owned(),
    };
    assert_eq!(caller.call(Method::RunPodSandbox, &run.encode_to_vec()).await.ok(), b"sent");
    let received =
        cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
    assert_eq!(seen.recv().await.unwrap(), frame(&received.encode_to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_a_backend_keeps_its_details() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let answer = caller.call(Method::PodSandboxStatus, &id("milpa-error")).await;
    assert_eq!(
        (answer.code(), answer.message().as_str()),
        (Code::NotFound as i32, "no such thing: 100 %")
    );
    let status = tonic::Status::from_header_map(&answer.headers).unwrap();
    assert_eq!(status.details(), b"\x00details\xff");
    assert_eq!(answer.headers["content-type"], "application/grpc");
    assert!(answer.trailers.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn backend_gets_the_remaining_deadline() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let answer = caller
        .raw(Method::ExecSync.path(), &[("grpc-timeout", "2H")], frame(&id("milpa-deadline")))
        .await
        .unwrap();
    let left: u64 = str::from_utf8(answer.ok()).unwrap().parse().unwrap();
    assert!((7000..7200).contains(&left), "{left}");
    assert_eq!(caller.call(Method::ExecSync, &id("milpa-deadline")).await.ok(), b"");
}

/// Returns a request of each method that can be for a pod of the backend. The backend does not
/// answer them.
fn unanswered() -> Vec<(Method, Vec<u8>)> {
    use kiyot::proxy::methods::{Route, route};
    let hangs = || HANGS.to_owned();
    let ours = || cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata { uid: "ours".into(), ..Default::default() }),
        hostname: hangs(),
        annotations: [
            ("kubernetes.io/target-runtime".to_owned(), "kiyot".to_owned()),
            ("ours".to_owned(), String::new()),
        ]
        .into(),
        ..Default::default()
    };
    let of_image = || {
        Some(cri::ImageSpec {
            image: hangs(),
            annotations: ours().annotations,
            ..Default::default()
        })
    };
    let message = |method: Method| match route(method) {
        Route::ById(_) => Some(id(HANGS)),
        Route::Run => Some(
            cri::RunPodSandboxRequest { config: Some(ours()), ..Default::default() }
                .encode_to_vec(),
        ),
        Route::PullImage => Some(
            cri::PullImageRequest { sandbox_config: Some(ours()), ..Default::default() }
                .encode_to_vec(),
        ),
        Route::ImageStatus => Some(
            cri::ImageStatusRequest { image: of_image(), ..Default::default() }.encode_to_vec(),
        ),
        // filter.id
        Route::List(_) => {
            let filter = Some(cri::PodSandboxFilter { id: hangs(), ..Default::default() });
            Some(cri::ListPodSandboxRequest { filter }.encode_to_vec())
        }
        // Restoring a pod in a cell is refused at once.
        Route::Restore => None,
        Route::Node | Route::Status | Route::Metrics | Route::Events | Route::WholeNodeOnly => None,
    };
    Method::ALL.iter().filter_map(|&method| Some((method, message(method)?))).collect()
}

/// Verifies F2.
#[tokio::test(flavor = "multi_thread")]
async fn decoded_call_ends_with_its_deadline_and_its_caller() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let hanging = async |wanted: usize| {
        wait_until("the backend's calls", LONG, async || {
            (server.cells.hanging.load(Ordering::SeqCst) == wanted).then_some(())
        })
        .await;
    };
    let calls = unanswered();
    assert!(calls.len() >= 25, "{calls:?}");
    for (method, message) in calls {
        let answer = soon(caller.raw(method.path(), &[("grpc-timeout", "20m")], frame(&message)))
            .await
            .unwrap();
        assert_eq!(answer.code(), Code::DeadlineExceeded as i32, "{method}");
        hanging(0).await;

        let (response, mut stream) = caller.begin(method.path(), &[]).await;
        stream.send_data(frame(&message).into(), true).unwrap();
        hanging(1).await;
        stream.send_reset(Reason::CANCEL);
        hanging(0).await;
        drop(response);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_of_a_call_ends_only_that_call() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    assert_eq!(
        caller.call(Method::ExecSync, &id("milpa-panic")).await.code(),
        Code::Internal as i32
    );
    assert_eq!(caller.call(Method::ExecSync, &id("milpa1")).await.ok(), b"cells: ExecSync");
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_message_to_a_cell_is_unimplemented() {
    let server = Setup::default().start();
    let mut body = frame(&id("milpa1"));
    body[0] = 1;
    let caller = server.caller().await;
    let answer =
        caller.raw(Method::ExecSync.path(), &[("grpc-encoding", "gzip")], body).await.unwrap();
    assert_eq!(answer.code(), Code::Unimplemented as i32);
    assert_eq!(answer.headers["grpc-accept-encoding"], "identity");
}

#[tokio::test(flavor = "multi_thread")]
async fn second_message_of_a_unary_call_is_refused() {
    let server = Setup::default().start();
    let body = [frame(&id("milpa1")), frame(&id("milpa2"))].concat();
    let caller = server.caller().await;
    assert_eq!(
        caller.raw(Method::ExecSync.path(), &[], body).await.unwrap().code(),
        Code::Internal as i32
    );
}

/// Verifies F13.
#[tokio::test(flavor = "multi_thread")]
async fn messages_up_to_the_limit_pass_and_larger_are_refused() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let request = |length: usize| {
        cri::ExecSyncRequest {
            container_id: "milpa-echo".into(),
            cmd: vec!["x".repeat(length)],
            timeout: 0,
        }
        .encode_to_vec()
    };
    let message = request((16 << 20) - 32);
    assert!(message.len() <= 16 << 20);
    assert!(caller.call(Method::ExecSync, &message).await.ok() == message);
    for answer in [
        caller.call(Method::ExecSync, &request(16 << 20)).await,
        caller.call(Method::ExecSync, &id("milpa-large")).await,
    ] {
        assert_eq!(answer.code(), Code::ResourceExhausted as i32);
        assert!(answer.message().contains("16777216"), "{}", answer.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn image_calls_are_routed_by_their_pod() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let pull = |uid: &str| {
        let metadata = Some(cri::PodSandboxMetadata { uid: uid.into(), ..Default::default() });
        let config = cri::PodSandboxConfig { metadata, ..Default::default() };
        cri::PullImageRequest { sandbox_config: Some(config), ..Default::default() }.encode_to_vec()
    };
    let status = |annotation: Option<&str>, image: &str| {
        let annotations =
            annotation.map(|key| (key.to_string(), String::new())).into_iter().collect();
        let image = cri::ImageSpec { image: image.into(), annotations, ..Default::default() };
        cri::ImageStatusRequest { image: Some(image), verbose: false }.encode_to_vec()
    };
    let runtime = FakeRuntime::named(&server.containerd());
    assert_eq!(caller.call(Method::PullImage, &pull("ours")).await.ok(), b"cells: PullImage");
    assert_eq!(caller.call(Method::PullImage, &pull("theirs")).await.ok(), b"answer to PullImage");
    assert_eq!(
        caller.call(Method::ImageStatus, &status(Some("ours"), "a")).await.ok(),
        b"cells: ImageStatus"
    );
    assert_eq!(
        caller.call(Method::ImageStatus, &status(Some("theirs"), "a")).await.ok(),
        b"answer to ImageStatus"
    );
    runtime.stop().await;
    let reported = cri::ImageStatusResponse {
        image: Some(cri::Image { id: "cell's".into(), ..Default::default() }),
        ..Default::default()
    };
    server.cells.images.lock().unwrap().insert("a".into(), reported.encode_to_vec());
    let answers = [
        // The node lacks the image: the response has the image of the cells, if they report it.
        (Vec::new(), "a", reported.encode_to_vec()),
        (Vec::new(), "b", Vec::new()),
        // The node's own image wins.
        (
            cri::ImageStatusResponse { image: Some(cri::Image::default()), ..Default::default() }
                .encode_to_vec(),
            "a",
            vec![0x0a, 0],
        ),
    ];
    for (of_node, image, expected) in answers {
        let runtime = FakeRuntime::constant(&server.containerd(), of_node);
        let answer = soon(async {
            loop {
                let answer = caller.call(Method::ImageStatus, &status(None, image)).await;
                if answer.code() == 0 {
                    return answer;
                }
            }
        })
        .await;
        assert_eq!(answer.ok(), expected);
        runtime.stop().await;
    }
}

/// Verifies P11.
#[tokio::test(flavor = "multi_thread")]
async fn id_that_a_cell_reported_names_no_image_of_the_node_for_another_pod() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let has = |id: &str| cri::ImageStatusResponse {
        image: Some(cri::Image { id: id.into(), ..Default::default() }),
        ..Default::default()
    };
    for (reference, id) in [("honest", "cell's"), ("liar", "node's")] {
        let report = has(id).encode_to_vec();
        server.cells.images.lock().unwrap().insert(reference.into(), report);
    }
    // The node has only an image with the id `node's`.
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| async move {
        let body = crate::fake_runtime::read_all(&mut call.body).await.unwrap();
        let request = cri::ImageStatusRequest::decode(&body[5..]).unwrap();
        let found = request.image.unwrap().image == "node's";
        let answer = if found { has("node's").encode_to_vec() } else { Vec::new() };
        call.answer(&answer).await;
    });
    let status = async |reference: &str| {
        let annotations = [("like".to_owned(), String::new())].into();
        let image = cri::ImageSpec { image: reference.into(), annotations, ..Default::default() };
        let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
        caller.call(Method::ImageStatus, &request.encode_to_vec()).await.ok().to_vec()
    };
    assert_eq!(status("honest").await, has("cell's").encode_to_vec());
    assert_eq!(status("liar").await, b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn message_in_small_parts_is_reassembled() {
    let server = Setup::default().start();
    let caller = server.caller().await;
    let (response, mut stream) = caller.begin(Method::ExecSync.path(), &[]).await;
    for byte in frame(&id("milpa1")) {
        stream.send_data(Bytes::copy_from_slice(&[byte]), false).unwrap();
        tokio::task::yield_now().await;
    }
    let (head, mut body) = soon(response).await.unwrap().into_parts();
    assert_eq!(
        crate::caller::collect(head.headers, &mut body).await.unwrap().ok(),
        b"cells: ExecSync"
    );
}
