//! Lists are whole or an error.

use kiyot::backends::{Features, Method};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::{Caller, frame, soon},
    door::{Door, Setup},
    played::{Played, read_all},
};

pub(crate) const LISTS: [Method; 4] = [
    Method::ListPodSandbox,
    Method::ListContainers,
    Method::ListContainerStats,
    Method::ListPodSandboxStats,
];

/// All lists have their items, messages, in field 1.
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

/// A door with two pods of cells.
pub(crate) async fn setup(runtimes: &'static [&'static str]) -> (Door, Caller) {
    let door = Setup { runtimes, ..Setup::default() }.open();
    for method in LISTS {
        door.cells.snapshots.lock().unwrap().insert(method, Ok(list(&["milpa1", "milpa2"])));
    }
    let caller = door.caller().await;
    (door, caller)
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn lists_have_the_items_of_all_backends() {
    let (door, caller) = setup(&["containerd", "second"]).await;
    let _first = Played::listen(&door.containerd(), |call| async move {
        assert!(!call.head.headers.contains_key("grpc-accept-encoding"));
        call.answer(&list(&["a", "b"])).await;
    });
    let _second = Played::constant(&door.runtime("second"), list(&["c"]));
    for method in LISTS {
        let body = frame(b"");
        let answer =
            caller.raw(method.path(), &[("grpc-accept-encoding", "gzip")], body).await.unwrap();
        assert_eq!(ids(answer.ok()), ["a", "b", "c", "milpa1", "milpa2"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_in_the_filter_asks_its_backend_alone() {
    let (door, caller) = setup(&["containerd"]).await;
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
    drop(door);
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn with_any_runtime_down_a_list_is_unavailable() {
    let (door, caller) = setup(&["containerd", "second"]).await;
    let _first = Played::constant(&door.containerd(), list(&["a"]));
    for method in LISTS {
        let answer = caller.call(method, b"").await;
        assert_eq!(answer.code(), Code::Unavailable as i32);
        assert!(answer.message().contains("second.sock"), "{}", answer.message());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_runtime_is_the_lists() {
    let (door, caller) = setup(&["containerd"]).await;
    let _runtime = Played::listen(&door.containerd(), |mut call| async move {
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
async fn an_error_of_the_backend_is_the_lists() {
    let (door, caller) = setup(&["containerd"]).await;
    let _runtime = Played::constant(&door.containerd(), list(&["a"]));
    door.cells
        .snapshots
        .lock()
        .unwrap()
        .insert(Method::ListContainers, Err((Code::Internal, "no view".into())));
    assert_eq!(caller.call(Method::ListContainers, b"").await.code(), Code::Internal as i32);
}

/// Verifies F5.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_is_too_long_is_refused() {
    let (door, caller) = setup(&["containerd"]).await;
    let big = |length: usize| list(&[&"x".repeat(length)]);
    let runtime = Played::constant(&door.containerd(), big((16 << 20) - 100));
    assert_eq!(ids(caller.call(Method::ListContainers, b"").await.ok()).len(), 3);
    door.cells.snapshots.lock().unwrap().insert(Method::ListContainers, Ok(big(200)));
    let answer = caller.call(Method::ListContainers, b"").await;
    assert_eq!(answer.code(), Code::ResourceExhausted as i32);
    drop(runtime);
    let _runtime = Played::constant(&door.runtime("containerd"), big(20 << 20));
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
async fn metrics_of_cells_are_told_as_the_node_describes_them() {
    let (door, caller) = setup(&["containerd", "second"]).await;
    let node = Played::listen(&door.containerd(), |call| async move {
        assert!(!call.head.headers.contains_key("grpc-accept-encoding"));
        match Method::from_path(call.head.uri.path()).unwrap() {
            Method::ListMetricDescriptors => call.answer(b"the node's words").await,
            Method::ListPodSandboxMetrics => call.answer(&list(&["a"])).await,
            other => panic!("{other}"),
        }
    });
    let second = Played::constant(&door.runtime("second"), list(&["b"]));
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
    drop(second);
    // Whole, or an error.
    assert_eq!(metrics().await.code(), Code::Unavailable as i32);
    drop(node);
    assert_eq!(metrics().await.code(), Code::Unavailable as i32);
}

/// Verifies U9.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_node_does_not_describe_is_not_told() {
    // A node that has neither, as containerd 1.6, and one that has metrics alone.
    for code in ["12", "0"] {
        let (door, caller) = setup(&["containerd"]).await;
        let _node = Played::listen(&door.containerd(), move |mut call| async move {
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
async fn the_status_lists_the_handlers_of_all_backends() {
    let door = Setup::default().open();
    let node =
        cri::StatusResponse { status: Some(cri::RuntimeStatus::default()), ..Default::default() };
    let _runtime = Played::constant(&door.containerd(), node.encode_to_vec());
    let caller = door.caller().await;
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
async fn handlers_of_the_node_keep_what_they_say_of_themselves() {
    let door = Setup::default().open();
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
    // What a later version says is passed on too.
    let unknown = [0xba, 0x3e, 3, 1, 2, 3];
    let _runtime =
        Played::constant(&door.containerd(), [&node.encode_to_vec()[..], &unknown].concat());
    let answer = door.caller().await.call(Method::Status, b"").await;
    assert!(answer.ok().windows(unknown.len()).any(|part| part == unknown));
    let status = cri::StatusResponse::decode(answer.ok()).unwrap();
    assert_eq!(status.features, supplemental);
    // A kubelet refuses a pod that wants one of these of a handler without it: in cells there is
    // neither.
    let kiyot = cri::RuntimeHandler { name: "kiyot".into(), features: features(false) };
    assert_eq!(status.runtime_handlers, [handlers, vec![kiyot]].concat());
}

/// Verifies D43.
#[tokio::test(flavor = "multi_thread")]
async fn the_handler_of_cells_says_what_cells_do() {
    let door = Setup::default().open();
    let node =
        cri::StatusResponse { status: Some(cri::RuntimeStatus::default()), ..Default::default() };
    let _runtime = Played::constant(&door.containerd(), node.encode_to_vec());
    let caller = door.caller().await;
    for (recursive_read_only_mounts, may_be_on_node, told) in
        [(false, false, false), (true, false, true), (true, true, false)]
    {
        *door.cells.features.lock().unwrap() =
            Features { recursive_read_only_mounts, may_be_on_node };
        let status =
            cri::StatusResponse::decode(caller.call(Method::Status, b"").await.ok()).unwrap();
        let features = Some(cri::RuntimeHandlerFeatures {
            recursive_read_only_mounts: told,
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
async fn what_would_hide_pods_is_unimplemented() {
    let door = Setup::default().open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
    for &method in Method::ALL {
        let answer = caller.call(method, b"").await;
        let hides =
            kiyot::proxy::methods::route(method) == kiyot::proxy::methods::Route::WholeNodeOnly;
        // The played lists and Status of the backend are calls here, and their texts are appended.
        assert_eq!(answer.code() == Code::Unimplemented as i32, hides, "{method}");
    }
}
