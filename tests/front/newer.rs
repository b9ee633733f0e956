//! What later kubelets call: pods from checkpoints, and methods that this build does not know.

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
    door::Setup,
    played::{Played, read_all},
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
async fn a_pod_of_the_node_is_restored_there_and_one_of_cells_nowhere() {
    let door = Setup::default().open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
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
    // One that a policy leaves on the node has run there.
    assert_eq!(
        caller.call(Method::RestorePod, &restore("ns", Some("kiyot"), Some("stays"))).await.ok(),
        b"answer to RestorePod"
    );
}

/// Verifies F16.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_pod_is_known_as_its_runtimes() {
    let rule = Rule {
        name: "second".into(),
        namespace: vec!["far".into()],
        backend: "second".into(),
        ..Rule::default()
    };
    let routing = Routing { default: "containerd".into(), rules: vec![rule] };
    let door = Setup { runtimes: &["containerd", "second"], routing, ..Setup::default() }.open();
    let asked: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let count = asked.clone();
    let _first = Played::named(&door.containerd());
    let _second = Played::listen(&door.runtime("second"), move |mut call| {
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
    let caller = door.caller().await;
    caller.call(Method::RestorePod, &restore("far", None, None)).await.ok();
    let sandbox = cri::CheckpointPodRequest { pod_sandbox_id: "s1".into(), ..Default::default() }
        .encode_to_vec();
    let container = cri::StartContainerRequest { container_id: "c1".into() }.encode_to_vec();
    caller.call(Method::CheckpointPod, &sandbox).await.ok();
    caller.call(Method::StartContainer, &container).await.ok();
    // Nobody was asked whose the ids are.
    let expected =
        ["RestorePod", "CheckpointPod", "StartContainer"].map(|method| (method.to_owned(), 1));
    assert_eq!(*asked.lock().unwrap(), HashMap::from(expected));
}

/// Verifies F7.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_is_not_known_hides_no_pod() {
    for (cells, expected) in [(true, Code::Unimplemented as i32), (false, 0)] {
        let door = Setup { cells, ..Setup::default() }.open();
        let _runtime = Played::named(&door.containerd());
        let caller = door.caller().await;
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
