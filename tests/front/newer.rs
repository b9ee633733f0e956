//! Calls of later kubelets: pods from checkpoints, and unknown methods.

use std::{collections::HashMap, sync::Arc, sync::Mutex};

use bytes::Bytes;
use kiyot::backends::Method;
use kiyot_config::{Routing, Rule};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::{collect, frame, soon},
    fake_runtime::{FakeRuntime, read_all},
    server::Setup,
};

fn restore(namespace: &str, annotation: Option<&str>, label: Option<&str>) -> Vec<u8> {
    let metadata = Some(cri::PodSandboxMetadata {
        namespace: namespace.into(),
        uid: "u1".into(),
        ..Default::default()
    });
    let annotations = annotation
        .map(|value| ("kubernetes.io/target-runtime".to_owned(), value.to_owned()))
        .into_iter()
        .collect();
    let labels = label.map(|label| (label.to_owned(), String::new())).into_iter().collect();
    let config = cri::PodSandboxConfig { metadata, annotations, labels, ..Default::default() };
    cri::RestorePodRequest {
        checkpoint_path: "/checkpoint".into(),
        config: Some(config),
        ..Default::default()
    }
    .encode_to_vec()
}

/// Verifies F16.
#[tokio::test(flavor = "multi_thread")]
async fn restore_works_only_for_pods_of_the_node() {
    let server = Setup::default().start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    assert_eq!(
        caller.call(Method::RestorePod, &restore("ns", None, None)).await.ok(),
        b"answer to RestorePod"
    );
    let refused = caller.call(Method::RestorePod, &restore("ns", Some("kiyot"), None)).await;
    assert_eq!(refused.code(), Code::Unimplemented as i32);
    assert!(
        refused.message().contains("RestorePod is unsupported for pods in cells"),
        "{}",
        refused.message()
    );
    // A pod that policy leaves on the node has run there.
    assert_eq!(
        caller.call(Method::RestorePod, &restore("ns", Some("kiyot"), Some("stays"))).await.ok(),
        b"answer to RestorePod"
    );
}

/// Verifies F16.
#[tokio::test(flavor = "multi_thread")]
async fn restored_pod_belongs_to_its_runtime() {
    let rule = Rule {
        name: "second".into(),
        namespace: vec!["far".into()],
        backend: "second".into(),
        ..Rule::default()
    };
    let routing = Routing { default: "containerd".into(), rules: vec![rule] };
    let server = Setup { runtimes: &["containerd", "second"], routing, ..Setup::default() }.start();
    let asked: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let count = asked.clone();
    let _first = FakeRuntime::named(&server.containerd());
    let _second = FakeRuntime::listen(&server.runtime("second"), move |mut call| {
        let count = count.clone();
        async move {
            let method = call.head.uri.path().rsplit('/').next().unwrap().to_owned();
            *count.lock().unwrap().entry(method).or_default() += 1;
            read_all(&mut call.body).await.unwrap();
            let container =
                cri::RestoredContainer { name: "main".into(), container_id: "c1".into() };
            call.answer(
                &cri::RestorePodResponse {
                    pod_sandbox_id: "s1".into(),
                    restored_containers: vec![container],
                }
                .encode_to_vec(),
            )
            .await;
        }
    });
    let caller = server.caller().await;
    caller.call(Method::RestorePod, &restore("far", None, None)).await.ok();
    let sandbox = cri::CheckpointPodRequest { pod_sandbox_id: "s1".into(), ..Default::default() }
        .encode_to_vec();
    let container = cri::StartContainerRequest { container_id: "c1".into() }.encode_to_vec();
    caller.call(Method::CheckpointPod, &sandbox).await.ok();
    caller.call(Method::StartContainer, &container).await.ok();
    // No id was looked up.
    let expected =
        ["RestorePod", "CheckpointPod", "StartContainer"].map(|method| (method.to_owned(), 1));
    assert_eq!(*asked.lock().unwrap(), HashMap::from(expected));
}

/// Verifies F7.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_list_is_unimplemented() {
    for (cells, expected) in [(true, Code::Unimplemented as i32), (false, 0)] {
        let server = Setup { cells, ..Setup::default() }.start();
        let _runtime = FakeRuntime::named(&server.containerd());
        let caller = server.caller().await;
        for path in ["/runtime.v1.RuntimeService/ListPods", "/runtime.v1.RuntimeService/StreamPods"]
        {
            assert_eq!(caller.raw(path, &[], frame(b"")).await.unwrap().code(), expected, "{path}");
        }
        assert_eq!(
            caller
                .raw("/runtime.v1.RuntimeService/Levitate", &[], frame(b""))
                .await
                .unwrap()
                .code(),
            0
        );
    }
}

/// Returns the body of a call with these fields: the id in field 1, and a text.
fn levitate(id: &str) -> Vec<u8> {
    let request = cri::CheckpointPodRequest {
        pod_sandbox_id: id.into(),
        output_path: "/height".into(),
        ..Default::default()
    };
    frame(&request.encode_to_vec())
}

const LEVITATE: &str = "/runtime.v1.RuntimeService/Levitate";

/// Each request is sent in two parts, once for each position of the cut.
///
/// Verifies F21.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_method_with_the_id_of_a_cell_is_unimplemented() {
    let server = Setup::default().start();
    let seen: Arc<Mutex<Vec<u8>>> = Arc::default();
    let receives = seen.clone();
    let _runtime = FakeRuntime::listen(&server.containerd(), move |mut call| {
        let seen = receives.clone();
        async move {
            if call.head.uri.path() == LEVITATE {
                while let Some(part) = call.body.data().await {
                    let Ok(part) = part else { return };
                    seen.lock().unwrap().extend_from_slice(&part);
                }
            }
            call.answer(b"up").await;
        }
    });
    let caller = server.caller().await;
    let call = async |body: &[u8], cut: usize| {
        let (response, mut stream) = caller.begin(LEVITATE, &[]).await;
        if cut > 0 {
            stream.send_data(Bytes::copy_from_slice(&body[..cut]), false).unwrap();
            // After the response to a later call the first part has been read.
            caller.call(Method::Version, b"").await.ok();
        }
        // The call may have ended.
        let _ = stream.send_data(Bytes::copy_from_slice(&body[cut..]), true);
        let (head, mut body) = soon(response).await.unwrap().into_parts();
        collect(head.headers, &mut body).await.unwrap()
    };
    let (in_a_cell, on_the_node) = (levitate("milpa-1"), levitate("0a1b"));
    for cut in 0..in_a_cell.len() {
        let refused = call(&in_a_cell, cut).await;
        assert_eq!(refused.code(), Code::Unimplemented as i32, "{cut}");
        assert!(refused.message().contains("Levitate is unsupported"), "{}", refused.message());
        assert!(refused.message().contains("milpa-1"), "{}", refused.message());
        assert_eq!(*seen.lock().unwrap(), b"", "{cut}");
    }
    for cut in 0..on_the_node.len() {
        assert_eq!(call(&on_the_node, cut).await.ok(), b"up", "{cut}");
        assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), on_the_node, "{cut}");
    }
    // Only requests to the RuntimeService name pods and containers.
    let path = "/runtime.v1.ImageService/Levitate";
    assert_eq!(caller.raw(path, &[], in_a_cell).await.unwrap().ok(), b"up");
}
