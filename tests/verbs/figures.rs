//! Figures of the cell's machine: in variables, and as the bound of updates.

use std::sync::Arc;

use kiyot::backends::Method;
use kiyot_engine::{
    placement::{ApiRequests, NodeFigure, NodeResource},
    request::keys::ARCHITECTURE,
};
use kiyot_proto::cri;
use tonic::{Code, Status};

use crate::{
    kit::Fixture,
    placement::{PlayedRequests, with_types},
};

/// Verifies K19.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn variable_without_a_limit_has_the_figure_of_a_machine_alone() {
    let machine = with_types(&[("a", "0.2")]).await;
    for (kiyot, expected) in [(machine, "2"), (Fixture::start().await, "1000")] {
        let figure = NodeFigure {
            holder: "main".to_owned(),
            name: "CPUS".to_owned(),
            resource: NodeResource::Cpu,
            divisor: 1000,
        };
        let requests = ApiRequests { node_variables: vec![figure], ..ApiRequests::default() };
        kiyot.daemon.cri.set_pod_requests(Arc::new(PlayedRequests(Some(requests))));
        let sandbox = run(&kiyot).await;
        let mut request = kiyot.container_request(&sandbox, "main");
        let cpus = cri::KeyValue { key: "CPUS".to_owned(), value: b"1000".to_vec() };
        request.config.as_mut().unwrap().envs = vec![cpus];
        kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, request).await.unwrap();
        let created = kiyot.provider.only().with(|state| state.created[0].config.clone().unwrap());
        assert_eq!(created.envs[0].value, expected.as_bytes());
    }
}

/// Verifies U29.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn update_beyond_a_machine_is_refused_before_it_is_applied() {
    let kiyot = with_types(&[("a", "0.2")]).await;
    let sandbox = run(&kiyot).await;
    let main = create(&kiyot, &sandbox, "main", resources(1000, 1 << 30)).await;
    create(&kiyot, &sandbox, "side", resources(500, 1 << 30)).await;
    let ended = create(&kiyot, &sandbox, "ended", resources(2000, 3 << 30)).await;
    kiyot.start_container(&ended).await;
    kiyot.provider.only().exit("c2", 0);
    kiyot.exited(&ended).await;

    for (update, problem) in [
        (resources(1501, 0), "limits.cpu of 1.501 CPU is beyond its cell"),
        // The CPUs would fit, but are not applied either.
        (resources(1500, 3 << 30), "limits.memory of 3072 MiB is beyond its cell"),
    ] {
        let refused = resize(&kiyot, &main, update).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let text = format!("container \"main\": {problem}");
        assert!(refused.message().starts_with(&text), "{refused}");
    }
    assert_eq!(kiyot.provider.only().with(|state| state.updated.clone()), None);

    let fits = resources(1500, 2 << 30);
    resize(&kiyot, &main, fits.clone()).await.unwrap();
    let applied = kiyot.provider.only().with(|state| state.updated.clone().unwrap().linux);
    assert_eq!(applied, Some(fits));
}

/// After an update, the values that the cell has reported count.
///
/// Verifies U29.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_resources_bound_later_updates() {
    let kiyot = with_types(&[("a", "0.2")]).await;
    let sandbox = run(&kiyot).await;
    let main = create(&kiyot, &sandbox, "main", resources(500, 0)).await;
    let side = create(&kiyot, &sandbox, "side", resources(500, 0)).await;
    kiyot.provider.only().with(|state| {
        let linux = Some(resources(1500, 0));
        let reported = cri::ContainerResources { linux, ..Default::default() };
        state.containers.get_mut("c0").unwrap().resources = Some(reported);
    });
    resize(&kiyot, &main, resources(1500, 0)).await.unwrap();
    let kiyot = kiyot.restart().await;
    let refused = resize(&kiyot, &side, resources(501, 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    resize(&kiyot, &side, resources(400, 0)).await.unwrap();
}

/// Verifies U29.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn update_of_any_size_reaches_containerd_of_a_cell_on_the_node() {
    let kiyot = Fixture::start().await;
    let sandbox = run(&kiyot).await;
    let main = create(&kiyot, &sandbox, "main", resources(500, 0)).await;
    resize(&kiyot, &main, resources(1_000_000, 1 << 50)).await.unwrap();
}

/// Runs a pod for an instance of the types, and returns its sandbox.
async fn run(kiyot: &Fixture) -> String {
    let mut request = kiyot.sandbox_request("web");
    let annotations = &mut request.config.as_mut().unwrap().annotations;
    if !kiyot.provider.catalogue.lock().unwrap().entries().is_empty() {
        annotations.insert(ARCHITECTURE.to_owned(), "amd64".to_owned());
    }
    let sandbox: cri::RunPodSandboxResponse =
        kiyot.call(Method::RunPodSandbox, request).await.unwrap();
    sandbox.pod_sandbox_id
}

async fn create(
    kiyot: &Fixture,
    sandbox: &str,
    name: &str,
    resources: cri::LinuxContainerResources,
) -> String {
    let mut request = kiyot.container_request(sandbox, name);
    request.config.as_mut().unwrap().linux =
        Some(cri::LinuxContainerConfig { resources: Some(resources), ..Default::default() });
    let container: cri::CreateContainerResponse =
        kiyot.call(Method::CreateContainer, request).await.unwrap();
    container.container_id
}

async fn resize(
    kiyot: &Fixture,
    container: &str,
    resources: cri::LinuxContainerResources,
) -> Result<cri::UpdateContainerResourcesResponse, Status> {
    let request = cri::UpdateContainerResourcesRequest {
        container_id: container.to_owned(),
        linux: Some(resources),
        ..Default::default()
    };
    kiyot.call(Method::UpdateContainerResources, request).await
}

/// Returns limits; 0 for none.
fn resources(milli_cpus: i64, memory_limit_in_bytes: i64) -> cri::LinuxContainerResources {
    cri::LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: milli_cpus * 100,
        memory_limit_in_bytes,
        ..Default::default()
    }
}
