//! Lists, which are complete or an error.

use kiyot::backends::{Features, Method};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::{Caller, frame, soon},
    fake_runtime::{FakeRuntime, read_all},
    server::{Setup, TestServer},
};

pub(crate) const LISTS: [Method; 4] = [
    Method::ListPodSandbox,
    Method::ListContainers,
    Method::ListContainerStats,
    Method::ListPodSandboxStats,
];

/// Returns a list. All lists have their items in field 1.
pub(crate) fn list(items: &[&str]) -> Vec<u8> {
    let items = items
        .iter()
        .map(|id| cri::PodSandbox { id: id.to_string(), ..Default::default() })
        .collect();
    cri::ListPodSandboxResponse { items }.encode_to_vec()
}

fn ids(message: &[u8]) -> Vec<String> {
    cri::ListPodSandboxResponse::decode(message)
        .unwrap()
        .items
        .into_iter()
        .map(|item| item.id)
        .collect()
}

/// Starts a server with two pods of cells.
pub(crate) async fn setup(runtimes: &'static [&'static str]) -> (TestServer, Caller) {
    let server = Setup { runtimes, ..Setup::default() }.start();
    for method in LISTS {
        server.cells.snapshots.lock().unwrap().insert(method, Ok(list(&["milpa1", "milpa2"])));
    }
    let caller = server.caller().await;
    (server, caller)
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn list_has_the_entries_of_all_backends() {
    let (server, caller) = setup(&["containerd", "second"]).await;
    let _first = FakeRuntime::listen(&server.containerd(), |call| async move {
        assert!(!call.head.headers.contains_key("grpc-accept-encoding"));
        call.answer(&list(&["a", "b"])).await;
    });
    let _second = FakeRuntime::constant(&server.runtime("second"), list(&["c"]));
    for method in LISTS {
        let body = frame(b"");
        let answer =
            caller.raw(method.path(), &[("grpc-accept-encoding", "gzip")], body).await.unwrap();
        assert_eq!(ids(answer.ok()), ["a", "b", "c", "milpa1", "milpa2"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn list_by_id_is_answered_by_the_backend_of_the_id() {
    let (server, caller) = setup(&["containerd"]).await;
    let of = |id: &str| {
        cri::ListPodSandboxRequest {
            filter: Some(cri::PodSandboxFilter { id: id.into(), ..Default::default() }),
        }
        .encode_to_vec()
    };
    // The runtime is down.
    assert_eq!(
        ids(caller.call(Method::ListPodSandbox, &of("milpa1")).await.ok()),
        ["milpa1", "milpa2"]
    );
    let filter = cri::ContainerFilter { pod_sandbox_id: "milpa1".into(), ..Default::default() };
    let containers = cri::ListContainersRequest { filter: Some(filter) }.encode_to_vec();
    assert_eq!(
        ids(caller.call(Method::ListContainers, &containers).await.ok()),
        ["milpa1", "milpa2"]
    );
    let filter =
        cri::ContainerStatsFilter { pod_sandbox_id: "milpa1".into(), ..Default::default() };
    let stats = cri::ListContainerStatsRequest { filter: Some(filter) }.encode_to_vec();
    assert_eq!(
        ids(caller.call(Method::ListContainerStats, &stats).await.ok()),
        ["milpa1", "milpa2"]
    );
    assert_eq!(
        caller.call(Method::ListPodSandbox, &of("abc")).await.code(),
        Code::Unavailable as i32
    );
    drop(server);
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn list_is_unavailable_while_a_runtime_is_down() {
    let (server, caller) = setup(&["containerd", "second"]).await;
    let _first = FakeRuntime::constant(&server.containerd(), list(&["a"]));
    for method in LISTS {
        let answer = caller.call(method, b"").await;
        assert_eq!(answer.code(), Code::Unavailable as i32);
        assert!(answer.message().contains("second.sock"), "{}", answer.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_a_runtime_is_the_error_of_the_list() {
    let (server, caller) = setup(&["containerd"]).await;
    let _runtime = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        let _ = read_all(&mut call.body).await;
        let response = http::Response::builder()
            .header("grpc-status", "9")
            .header("grpc-message", "not%20now")
            .body(())
            .unwrap();
        call.respond.send_response(response, true).unwrap();
    });
    let answer = caller.call(Method::ListContainers, b"").await;
    assert_eq!((answer.code(), answer.message().as_str(), answer.trailers), (9, "not now", None));
}

#[tokio::test(flavor = "multi_thread")]
async fn error_of_a_decoded_backend_is_the_error_of_the_list() {
    let (server, caller) = setup(&["containerd"]).await;
    let _runtime = FakeRuntime::constant(&server.containerd(), list(&["a"]));
    server
        .cells
        .snapshots
        .lock()
        .unwrap()
        .insert(Method::ListContainers, Err((Code::Internal, "no view".into())));
    assert_eq!(caller.call(Method::ListContainers, b"").await.code(), Code::Internal as i32);
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn list_above_the_message_limit_is_refused() {
    let (server, caller) = setup(&["containerd"]).await;
    let big = |length: usize| list(&[&"x".repeat(length)]);
    let runtime = FakeRuntime::constant(&server.containerd(), big((16 << 20) - 100));
    assert_eq!(ids(caller.call(Method::ListContainers, b"").await.ok()).len(), 3);
    server.cells.snapshots.lock().unwrap().insert(Method::ListContainers, Ok(big(200)));
    let answer = caller.call(Method::ListContainers, b"").await;
    assert_eq!(answer.code(), Code::ResourceExhausted as i32);
    runtime.stop().await;
    let _runtime = FakeRuntime::constant(&server.runtime("containerd"), big(20 << 20));
    let answer = soon(async {
        loop {
            let answer = caller.call(Method::ListContainers, b"").await;
            if answer.code() != Code::Unavailable as i32 {
                return answer;
            }
        }
    })
    .await;
    assert_eq!(answer.code(), Code::ResourceExhausted as i32);
}

/// Verifies U9.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_cells_follow_the_descriptors_of_the_node() {
    let (server, caller) = setup(&["containerd", "second"]).await;
    let node = FakeRuntime::listen(&server.containerd(), |call| async move {
        assert!(!call.head.headers.contains_key("grpc-accept-encoding"));
        match Method::from_path(call.head.uri.path()).unwrap() {
            Method::ListMetricDescriptors => call.answer(b"the node's words").await,
            Method::ListPodSandboxMetrics => call.answer(&list(&["a"])).await,
            other => panic!("{other}"),
        }
    });
    let second = FakeRuntime::constant(&server.runtime("second"), list(&["b"]));
    let metrics = async || {
        caller
            .raw(
                Method::ListPodSandboxMetrics.path(),
                &[("grpc-accept-encoding", "gzip")],
                frame(b""),
            )
            .await
            .unwrap()
    };
    assert_eq!(ids(metrics().await.ok()), ["a", "b", "milpa by the node's words"]);
    second.stop().await;
    // Complete, or an error.
    assert_eq!(metrics().await.code(), Code::Unavailable as i32);
    node.stop().await;
    assert_eq!(metrics().await.code(), Code::Unavailable as i32);
}

/// Verifies U9.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_without_descriptors_of_the_node_are_omitted() {
    // A node without metrics and descriptors, like containerd 1.6, and a node with metrics alone.
    for code in ["12", "0"] {
        let (server, caller) = setup(&["containerd"]).await;
        let _node = FakeRuntime::listen(&server.containerd(), move |mut call| async move {
            if code == "0" && call.head.uri.path() == Method::ListPodSandboxMetrics.path() {
                return call.answer(&list(&["a"])).await;
            }
            let _ = read_all(&mut call.body).await;
            let response = http::Response::builder()
                .header("grpc-status", "12")
                .header("grpc-message", "not%20here")
                .body(())
                .unwrap();
            call.respond.send_response(response, true).unwrap();
        });
        let answer = caller.call(Method::ListPodSandboxMetrics, b"").await;
        match code {
            "0" => assert_eq!(ids(answer.ok()), ["a"]),
            _ => assert_eq!(
                (answer.code(), answer.message().as_str()),
                (Code::Unimplemented as i32, "not here")
            ),
        }
    }
}

/// Verifies F7.
#[tokio::test(flavor = "multi_thread")]
async fn status_has_the_handlers_of_all_backends() {
    let server = Setup::default().start();
    let node =
        cri::StatusResponse { status: Some(cri::RuntimeStatus::default()), ..Default::default() };
    let _runtime = FakeRuntime::constant(&server.containerd(), node.encode_to_vec());
    let caller = server.caller().await;
    let answer = caller.call(Method::Status, b"").await;
    let status = cri::StatusResponse::decode(answer.ok()).unwrap();
    assert_eq!(
        status.runtime_handlers.into_iter().map(|handler| handler.name).collect::<Vec<_>>(),
        ["", "kiyot"]
    );
    assert_eq!(status.status, node.status);
}

/// Verifies F7.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_of_the_node_keep_their_features() {
    let server = Setup::default().start();
    let features = |yes| {
        Some(cri::RuntimeHandlerFeatures { recursive_read_only_mounts: yes, user_namespaces: yes })
    };
    let handlers = ["", "runc"]
        .map(|name| cri::RuntimeHandler { name: name.into(), features: features(true) })
        .to_vec();
    let supplemental =
        Some(cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() });
    let node = cri::StatusResponse {
        runtime_handlers: handlers.clone(),
        features: supplemental,
        ..Default::default()
    };
    // Fields of a later CRI are forwarded.
    let unknown = [0xba, 0x3e, 3, 1, 2, 3];
    let _runtime =
        FakeRuntime::constant(&server.containerd(), [&node.encode_to_vec()[..], &unknown].concat());
    let answer = server.caller().await.call(Method::Status, b"").await;
    assert!(answer.ok().windows(unknown.len()).any(|part| part == unknown));
    let status = cri::StatusResponse::decode(answer.ok()).unwrap();
    assert_eq!(status.features, supplemental);
    // A kubelet refuses a pod if the handler lacks a feature of its request. Cells have neither.
    let kiyot = cri::RuntimeHandler { name: "kiyot".into(), features: features(false) };
    assert_eq!(status.runtime_handlers, [handlers, vec![kiyot]].concat());
}

/// Verifies D43.
#[tokio::test(flavor = "multi_thread")]
async fn handler_of_cells_has_the_features_of_cells() {
    let server = Setup::default().start();
    let node =
        cri::StatusResponse { status: Some(cri::RuntimeStatus::default()), ..Default::default() };
    let _runtime = FakeRuntime::constant(&server.containerd(), node.encode_to_vec());
    let caller = server.caller().await;
    for (recursive_read_only_mounts, may_be_on_node, received) in
        [(false, false, false), (true, false, true), (true, true, false)]
    {
        *server.cells.features.lock().unwrap() =
            Features { recursive_read_only_mounts, may_be_on_node };
        let status =
            cri::StatusResponse::decode(caller.call(Method::Status, b"").await.ok()).unwrap();
        let features = Some(cri::RuntimeHandlerFeatures {
            recursive_read_only_mounts: received,
            user_namespaces: false,
        });
        let none = Some(cri::RuntimeHandlerFeatures::default());
        let handlers = [("", none), ("kiyot", features)]
            .map(|(name, features)| cri::RuntimeHandler { name: name.into(), features });
        assert_eq!(status.runtime_handlers, handlers);
    }
}

/// Verifies F7.
#[tokio::test(flavor = "multi_thread")]
async fn call_that_would_hide_pods_is_unimplemented() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    for &method in Method::ALL {
        let answer = caller.call(method, b"").await;
        let hides =
            kiyot::proxy::methods::route(method) == kiyot::proxy::methods::Route::WholeNodeOnly;
        // The fake backend answers lists and Status with texts, which are appended.
        assert_eq!(answer.code() == Code::Unimplemented as i32, hides, "{method}");
    }
}
