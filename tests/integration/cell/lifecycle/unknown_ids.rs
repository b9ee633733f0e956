//! Calls with unknown ids. An unknown id with a cell's prefix gets the same response as an id that
//! is unknown to containerd.

use kiyot_testkit::{Kiyot, Kubelet, Node, cri};
use tonic::Code;

use crate::cell::options;

/// Collects the outcomes of calls by name.
macro_rules! outcomes {
    ($runtime:expr, $id:expr, $($call:ident($request:ident { $($fields:tt)* });)*) => {
        vec![$({
            let request = cri::$request { $($fields)* };
            (stringify!($call), outcome($runtime.$call(request).await, $id))
        }),*]
    };
}

/// Returns the code of a response, and whether its message names the id.
fn outcome<T>(answer: Result<T, tonic::Status>, id: &str) -> (Code, bool) {
    answer
        .map_or_else(|status| (status.code(), status.message().contains(id)), |_| (Code::Ok, true))
}

/// Makes all calls by id that containerd 1.6 knows.
async fn call_all(kubelet: &mut Kubelet, id: &str) -> Vec<(&'static str, (Code, bool))> {
    let (pod_sandbox_id, container_id) = (id.to_owned(), id.to_owned());
    let runtime = &mut kubelet.runtime;
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "busybox".to_owned(), ..Default::default() }),
        ..Default::default()
    };
    let metadata = Some(cri::PodSandboxMetadata {
        name: "nobody".to_owned(),
        uid: "of-nobody".to_owned(),
        namespace: "ns".to_owned(),
        attempt: 0,
    });
    let sandbox_config = Some(cri::PodSandboxConfig { metadata, ..Default::default() });
    let resources = Some(cri::LinuxContainerResources { cpu_shares: 2, ..Default::default() });
    outcomes! { runtime, id,
        stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        pod_sandbox_status(PodSandboxStatusRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
            verbose: false,
        });
        pod_sandbox_stats(PodSandboxStatsRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        port_forward(PortForwardRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
            port: vec![80],
        });
        create_container(CreateContainerRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
            config: Some(config),
            sandbox_config,
        });
        start_container(StartContainerRequest { container_id: container_id.clone() });
        stop_container(StopContainerRequest { container_id: container_id.clone(), timeout: 1 });
        remove_container(RemoveContainerRequest { container_id: container_id.clone() });
        container_status(ContainerStatusRequest {
            container_id: container_id.clone(),
            verbose: true,
        });
        container_stats(ContainerStatsRequest { container_id: container_id.clone() });
        update_container_resources(UpdateContainerResourcesRequest {
            container_id: container_id.clone(),
            linux: resources,
            ..Default::default()
        });
        reopen_container_log(ReopenContainerLogRequest { container_id: container_id.clone() });
        exec_sync(ExecSyncRequest {
            container_id: container_id.clone(),
            cmd: vec!["true".to_owned()],
            timeout: 1,
        });
        exec(ExecRequest {
            container_id: container_id.clone(),
            cmd: vec!["true".to_owned()],
            stdout: true,
            ..Default::default()
        });
        attach(AttachRequest {
            container_id: container_id.clone(),
            stdout: true,
            ..Default::default()
        });
    }
}

/// Verifies P4.
#[tokio::test]
async fn every_call_by_an_unknown_id_is_answered_as_containerd_answers_it() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let on_node = Box::pin(call_all(&mut kubelet, &"ab".repeat(32))).await;
    let in_cell = Box::pin(call_all(&mut kubelet, &format!("milpa{}", "z".repeat(59)))).await;
    for ((call, (on_node, _)), (_, (in_cell, names_it))) in on_node.iter().zip(&in_cell) {
        // In CRI, stopping an unknown id succeeds. containerd complies since 1.7.
        let stops = call.starts_with("stop_") && *on_node == Code::NotFound;
        assert_eq!(*in_cell, if stops { Code::Ok } else { *on_node }, "{call}");
        assert!(names_it, "{call} names the unknown id");
    }
    let of = |code| {
        in_cell
            .iter()
            .filter(|(_, (outcome_code, _))| *outcome_code == code)
            .map(|(call, _)| *call)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of(Code::Ok),
        ["stop_pod_sandbox", "remove_pod_sandbox", "stop_container", "remove_container"]
    );
    assert_eq!(of(Code::Ok).len() + of(Code::NotFound).len(), in_cell.len(), "{in_cell:?}");
    assert!(
        kubelet.sandboxes().await.unwrap().is_empty()
            && kubelet.containers().await.unwrap().is_empty()
    );
}
