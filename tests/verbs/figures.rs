//! Figures of the cell's machine in variables.

use std::sync::Arc;

use kiyot::backends::Method;
use kiyot_engine::{
    placement::{ApiRequests, NodeFigure, NodeResource},
    request::keys::ARCHITECTURE,
};
use kiyot_proto::cri;

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
