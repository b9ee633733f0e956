//! The node's hardware in requests to machines.

use kiyot::backends::Method;
use kiyot_proto::cri;

use crate::kit::Fixture;

fn resources() -> Option<cri::LinuxContainerResources> {
    Some(cri::LinuxContainerResources {
        cpu_shares: 512,
        cpuset_cpus: "62-63".to_owned(),
        cpuset_mems: "1".to_owned(),
        hugepage_limits: vec![cri::HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 }],
        ..Default::default()
    })
}

fn pod_resources() -> Option<cri::LinuxPodSandboxConfig> {
    Some(cri::LinuxPodSandboxConfig { resources: resources(), ..Default::default() })
}

/// Verifies U26.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hardware_of_the_node_is_not_sent_to_a_machine() {
    let kiyot = Fixture::start().await;
    let mut run = kiyot.sandbox_request("web");
    run.config.as_mut().unwrap().linux = pod_resources();
    let sandbox: cri::RunPodSandboxResponse = kiyot.call(Method::RunPodSandbox, run).await.unwrap();
    let mut create = kiyot.container_request(&sandbox.pod_sandbox_id, "main");
    create.config.as_mut().unwrap().linux =
        Some(cri::LinuxContainerConfig { resources: resources(), ..Default::default() });
    create.sandbox_config.as_mut().unwrap().linux = pod_resources();
    let container: cri::CreateContainerResponse =
        kiyot.call(Method::CreateContainer, create).await.unwrap();
    let update = cri::UpdateContainerResourcesRequest {
        container_id: container.container_id,
        linux: resources(),
        ..Default::default()
    };
    kiyot
        .call::<cri::UpdateContainerResourcesResponse>(Method::UpdateContainerResources, update)
        .await
        .unwrap();

    let of_pod = |config: Option<cri::PodSandboxConfig>| config?.linux?.resources;
    let sent = kiyot.provider.only().with(|state| {
        let created = state.created[0].clone();
        [
            of_pod(state.sandbox.clone().unwrap().config),
            created.config.unwrap().linux.unwrap().resources,
            of_pod(created.sandbox_config),
            state.updated.clone().unwrap().linux,
        ]
    });
    for (n, resources) in sent.into_iter().enumerate() {
        let kept = cri::LinuxContainerResources { cpu_shares: 512, ..Default::default() };
        assert_eq!(resources, Some(kept), "request {n}");
    }
}
