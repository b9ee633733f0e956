//! Calls by an id of nobody: one that could be a cell's is answered as containerd answers one that
//! could be its own.

use kiyot_testkit::{Kiyot, Kubelet, Node, cri};
use tonic::Code;

use super::options;

/// How each of these calls ends.
macro_rules! outcomes {
    ($runtime:expr, $id:expr, $($call:ident($request:expr);)*) => {
        vec![$((stringify!($call), outcome($runtime.$call($request).await, $id))),*]
    };
}

/// Its code, and whether its words name the id.
fn outcome<T>(answer: Result<T, tonic::Status>, id: &str) -> (Code, bool) {
    answer
        .map_or_else(|status| (status.code(), status.message().contains(id)), |_| (Code::Ok, true))
}

/// All calls by an id that containerd 1.6 knows.
async fn called(kubelet: &mut Kubelet, id: &str) -> Vec<(&'static str, (Code, bool))> {
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
    let exec = || cri::ExecRequest {
        container_id: container_id.clone(),
        cmd: vec!["true".to_owned()],
        stdout: true,
        ..Default::default()
    };
    outcomes! { runtime, id,
        stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        pod_sandbox_status(cri::PodSandboxStatusRequest { pod_sandbox_id: pod_sandbox_id.clone(), verbose: false });
        pod_sandbox_stats(cri::PodSandboxStatsRequest { pod_sandbox_id: pod_sandbox_id.clone() });
        port_forward(cri::PortForwardRequest { pod_sandbox_id: pod_sandbox_id.clone(), port: vec![80] });
        create_container(cri::CreateContainerRequest { pod_sandbox_id: pod_sandbox_id.clone(), config: Some(config), sandbox_config });
        start_container(cri::StartContainerRequest { container_id: container_id.clone() });
        stop_container(cri::StopContainerRequest { container_id: container_id.clone(), timeout: 1 });
        remove_container(cri::RemoveContainerRequest { container_id: container_id.clone() });
        container_status(cri::ContainerStatusRequest { container_id: container_id.clone(), verbose: true });
        container_stats(cri::ContainerStatsRequest { container_id: container_id.clone() });
        update_container_resources(cri::UpdateContainerResourcesRequest { container_id: container_id.clone(), linux: resources, ..Default::default() });
        reopen_container_log(cri::ReopenContainerLogRequest { container_id: container_id.clone() });
        exec_sync(cri::ExecSyncRequest { container_id: container_id.clone(), cmd: vec!["true".to_owned()], timeout: 1 });
        exec(exec());
        attach(cri::AttachRequest { container_id: container_id.clone(), stdout: true, ..Default::default() });
    }
}

/// Verifies P4.
#[tokio::test]
async fn every_call_by_an_unknown_id_is_answered_as_containerd_answers_it() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let on_node = Box::pin(called(&mut kubelet, &"ab".repeat(32))).await;
    let in_cell = Box::pin(called(&mut kubelet, &format!("milpa{}", "z".repeat(59)))).await;
    for ((call, (on_node, _)), (_, (in_cell, names_it))) in on_node.iter().zip(&in_cell) {
        // What is not there is stopped: so says CRI, and containerd since 1.7.
        let stops = call.starts_with("stop_") && *on_node == Code::NotFound;
        assert_eq!(*in_cell, if stops { Code::Ok } else { *on_node }, "{call}");
        assert!(names_it, "{call} says which id is not known");
    }
    let of = |code| {
        in_cell
            .iter()
            .filter(|(_, (told, _))| *told == code)
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
