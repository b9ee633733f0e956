//! Callers that go away and come again.

use std::time::{Duration, Instant};

use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::kit::{Fixture, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_joins_the_launch_and_gets_its_sandbox() {
    let kiyot = Fixture::start().await;
    let permits = kiyot.provider.gate.available_permits();
    kiyot.provider.gate.forget_permits(permits);
    let mut request = kiyot.sandbox_request("web");
    let first = kiyot.daemon.verbs.call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now())).await;
    assert_eq!(first.unwrap_err().code(), Code::DeadlineExceeded);
    request.config.as_mut().unwrap().annotations.insert("changed".to_owned(), "meanwhile".to_owned());
    let second = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone());
    let third = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone());
    kiyot.provider.gate.add_permits(10);
    let (second, third) = tokio::join!(second, third);
    let (second, third) = (second.unwrap(), third.unwrap());
    assert_eq!(second, third);
    assert_eq!(kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone()).await.unwrap(), second);
    assert_eq!(kiyot.provider.launched(), 1);

    // Another config under the same name: the old one is torn down.
    request.config.as_mut().unwrap().hostname = "other".to_owned();
    let other: cri::RunPodSandboxResponse = kiyot.call(Method::RunPodSandbox, request).await.unwrap();
    assert_ne!(other, second);
    assert_eq!((kiyot.provider.launched(), kiyot.provider.running(), kiyot.sandboxes().len()), (2, 1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_nobody_asks_for_is_torn_down() {
    let kiyot = Fixture::adopting_within(Duration::from_millis(50)).await;
    let request = kiyot.sandbox_request("web");
    let gone = kiyot.daemon.verbs.call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now())).await;
    assert_eq!(gone.unwrap_err().code(), Code::DeadlineExceeded);
    until("the launch", || kiyot.provider.launched() == 1).await;
    until("the end of the abandoned sandbox", || kiyot.provider.running() == 0 && kiyot.sandboxes().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_creation_was_not_answered_is_made_once() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    kiyot.provider.only().with(|state| state.lose.push("CreateContainer"));
    let container = kiyot.create(&sandbox, "main").await;
    assert_eq!(kiyot.provider.only().with(|state| state.containers.len()), 1);
    assert_eq!(kiyot.create(&sandbox, "main").await, container, "the answer to the kubelet was lost");
    assert_eq!(kiyot.containers().len(), 1);
    kiyot.start_container(&container).await;
    let status = kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, kiyot.container_request(&sandbox, "main")).await.unwrap_err();
    assert!(status.message().contains("is reserved for"), "{status}");
}
