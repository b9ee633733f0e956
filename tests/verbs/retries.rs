//! Callers that leave and retry.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::kit::{Fixture, LIMIT, until};

/// Verifies P2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_joins_the_launch_and_gets_its_sandbox() {
    let kiyot = Fixture::start().await;
    let permits = kiyot.provider.gate.available_permits();
    kiyot.provider.gate.forget_permits(permits);
    let mut request = kiyot.sandbox_request("web");
    let first = kiyot
        .daemon
        .cri
        .call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now()))
        .await;
    assert_eq!(first.unwrap_err().code(), Code::DeadlineExceeded);
    // Labels and annotations, which may change while a pod runs, make no other launch or sandbox.
    let change = |request: &mut cri::RunPodSandboxRequest, label: &str| {
        let config = request.config.as_mut().unwrap();
        config.annotations.insert("changed".to_owned(), "meanwhile".to_owned());
        config.labels.insert("changed".to_owned(), label.to_owned());
    };
    change(&mut request, "meanwhile");
    let second = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone());
    let third = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone());
    kiyot.provider.gate.add_permits(10);
    let (second, third) = tokio::join!(second, third);
    let (second, third) = (second.unwrap(), third.unwrap());
    assert_eq!(second, third);
    assert_eq!(
        kiyot
            .call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone())
            .await
            .unwrap(),
        second
    );
    for label in ["later", "again"] {
        change(&mut request, label);
        assert_eq!(
            kiyot
                .call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone())
                .await
                .unwrap(),
            second
        );
    }
    assert_eq!(kiyot.provider.launched(), 1);

    // Another config under the same name replaces the sandbox.
    request.config.as_mut().unwrap().hostname = "other".to_owned();
    let other: cri::RunPodSandboxResponse =
        kiyot.call(Method::RunPodSandbox, request).await.unwrap();
    assert_ne!(other, second);
    assert_eq!(
        (kiyot.provider.launched(), kiyot.provider.running(), kiyot.sandboxes().len()),
        (2, 1, 1)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unclaimed_sandbox_is_removed() {
    let kiyot = Fixture::with_claim_timeout(Duration::from_millis(50)).await;
    let request = kiyot.sandbox_request("web");
    let gone = kiyot
        .daemon
        .cri
        .call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now()))
        .await;
    assert_eq!(gone.unwrap_err().code(), Code::DeadlineExceeded);
    until("the launch", || kiyot.provider.launched() == 1).await;
    until("the end of the abandoned sandbox", || {
        kiyot.provider.running() == 0 && kiyot.sandboxes().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_whose_creation_was_not_answered_is_created_once() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    kiyot.provider.only().with(|state| state.lost_responses.push("CreateContainer"));
    let container = kiyot.create(&sandbox, "main").await;
    assert_eq!(kiyot.provider.only().with(|state| state.containers.len()), 1);
    assert_eq!(
        kiyot.create(&sandbox, "main").await,
        container,
        "the answer to the kubelet was lost"
    );
    assert_eq!(kiyot.containers().len(), 1);
    kiyot.start_container(&container).await;
    let status = kiyot
        .call::<cri::CreateContainerResponse>(
            Method::CreateContainer,
            kiyot.container_request(&sandbox, "main"),
        )
        .await
        .unwrap_err();
    assert!(status.message().contains("is reserved for"), "{status}");
}

/// Verifies X8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_claimed_during_the_removal_of_another_stays() {
    const ABANDONED: usize = 4;
    let kiyot = Fixture::with_claim_timeout(Duration::from_millis(500)).await;
    let permits = kiyot.provider.way_out.available_permits();
    kiyot.provider.way_out.forget_permits(permits);
    let abandon = async |name: String| {
        let gone = kiyot
            .daemon
            .cri
            .call(
                Method::RunPodSandbox,
                kiyot.sandbox_request(&name).encode_to_vec().into(),
                Some(Instant::now()),
            )
            .await;
        assert_eq!(gone.unwrap_err().code(), Code::DeadlineExceeded);
    };
    for number in 0..ABANDONED {
        abandon(format!("abandoned-{number}")).await;
    }
    // A removal runs, and the other sandboxes would be next.
    until("the first end", || kiyot.provider.asked_to_end.load(Ordering::SeqCst) == 1).await;
    until("all are there", || kiyot.sandboxes().len() == ABANDONED).await;
    let sandboxes = kiyot.sandboxes();
    for sandbox in &sandboxes {
        kiyot.sandbox_status(&sandbox.id).unwrap();
    }
    kiyot.provider.way_out.add_permits(10);
    until("the end of the one", || kiyot.sandboxes().len() == ABANDONED - 1).await;
    // When a later unclaimed sandbox is removed, the claim timeout of the others is over.
    abandon("last".to_owned()).await;
    until("the end of the last", || {
        kiyot.provider.asked_to_end.load(Ordering::SeqCst) >= 2
            && kiyot.sandboxes().len() < ABANDONED
    })
    .await;
    let left = kiyot.sandboxes();
    assert_eq!(
        (left.len(), kiyot.provider.running()),
        (ABANDONED - 1, ABANDONED - 1),
        "they were asked for"
    );
    assert!(left.iter().all(|left| sandboxes.iter().any(|sandbox| sandbox.id == left.id)));
}

/// Verifies X12, Y96.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_of_a_container_that_may_be_starting_is_unavailable() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (made, done) = (kiyot.create(&sandbox, "made").await, kiyot.create(&sandbox, "done").await);
    kiyot.start_container(&done).await;
    kiyot.provider.only().exit("c1", 0);
    kiyot.exited(&done).await;
    kiyot.provider.silence();
    let remove = |id: &str| cri::RemoveContainerRequest { container_id: id.to_owned() };
    // Once the daemon knows that the agent has ended, it succeeds.
    let gone = async {
        while kiyot
            .call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove(&done))
            .await
            .is_err()
        {}
    };
    tokio::time::timeout(LIMIT, gone).await.unwrap();
    // A previous daemon may have started this container.
    let refused =
        kiyot.call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove(&made)).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    assert_eq!(
        kiyot.containers().iter().map(|container| container.id.as_str()).collect::<Vec<_>>(),
        [made.as_str()]
    );
    kiyot.stop_sandbox(&sandbox).await;
    kiyot
        .call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove(&made))
        .await
        .unwrap();
}
