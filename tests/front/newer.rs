//! Calls of later kubelets: pods from checkpoints, and unknown methods.

use std::{collections::HashMap, sync::Arc, sync::Mutex};

use kiyot::{
    backends::Method,
    config::{Routing, Rule},
};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::frame,
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
async fn restore_works_for_pods_of_the_node_alone() {
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
