//! Lists of pods in cells and pods on the node.

use std::slice;

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, cri, wait_until};
use tonic::Code;

use crate::cell::{WAIT, options, pod, remove_and_assert_clean};

/// Verifies P9.
#[tokio::test]
async fn lists_have_pods_in_cells_and_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = kubelet
        .run_pod(&Pod::new("local").label("tier", "one").container(Container::script("main", WAIT)))
        .await
        .unwrap();
    let remote = kubelet.run_pod(&pod("remote", WAIT).label("tier", "two")).await.unwrap();
    assert!(!local.sandbox.starts_with("milpa"));

    let mut listed: Vec<_> =
        kubelet.sandboxes().await.unwrap().into_iter().map(|sandbox| sandbox.id).collect();
    listed.sort();
    let mut both = vec![local.sandbox.clone(), remote.sandbox.clone()];
    both.sort();
    assert_eq!(listed, both);
    assert_eq!(kubelet.containers().await.unwrap().len(), 2);

    let of = async |kubelet: &mut kiyot_testkit::Kubelet, filter: cri::PodSandboxFilter| {
        let request = cri::ListPodSandboxRequest { filter: Some(filter) };
        kubelet
            .runtime
            .list_pod_sandbox(request)
            .await
            .unwrap()
            .into_inner()
            .items
            .into_iter()
            .map(|item| item.id)
            .collect::<Vec<_>>()
    };
    let label = |value: &str| cri::PodSandboxFilter {
        label_selector: [("tier".to_owned(), value.to_owned())].into(),
        ..Default::default()
    };
    assert_eq!(of(&mut kubelet, label("one")).await, slice::from_ref(&local.sandbox));
    assert_eq!(of(&mut kubelet, label("two")).await, slice::from_ref(&remote.sandbox));
    let by_id = |id: &str| cri::PodSandboxFilter { id: id.to_owned(), ..Default::default() };
    assert_eq!(of(&mut kubelet, by_id(&remote.sandbox)).await, slice::from_ref(&remote.sandbox));
    assert_eq!(
        of(&mut kubelet, by_id(&remote.sandbox[..13])).await,
        slice::from_ref(&remote.sandbox),
        "a prefix of the id matches"
    );
    assert_eq!(of(&mut kubelet, by_id(&local.sandbox)).await, slice::from_ref(&local.sandbox));

    let request = cri::ListContainersRequest {
        filter: Some(cri::ContainerFilter {
            pod_sandbox_id: remote.sandbox.clone(),
            ..Default::default()
        }),
    };
    let containers =
        kubelet.runtime.list_containers(request).await.unwrap().into_inner().containers;
    assert_eq!(
        containers.iter().map(|container| container.id.as_str()).collect::<Vec<_>>(),
        [remote.container("main").id.as_str()]
    );

    kubelet.stop_and_remove(&local).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &remote).await;
}

/// Verifies F5.
#[tokio::test]
async fn lists_fail_while_containerd_is_dead_and_pods_in_cells_live() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let remote = kubelet.run_pod(&pod("remote", WAIT)).await.unwrap();
    node.kill_containerd();
    let status = kubelet.sandboxes().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "a list is complete or an error: {status:?}");
    assert_eq!(
        kubelet.sandbox_status(&remote.sandbox).await.unwrap().state(),
        cri::PodSandboxState::SandboxReady
    );
    assert_eq!(
        kubelet.exec_sync(&remote.container("main").id, &["echo", "alive"]).await.unwrap().stdout,
        "alive\n"
    );
    node.start_containerd().await;
    let listed =
        wait_until("lists are complete again", LIMIT, async || kubelet.sandboxes().await.ok())
            .await;
    assert_eq!(listed.len(), 1);
    remove_and_assert_clean(&mut kubelet, &kiyot, &remote).await;
}

#[tokio::test]
async fn status_names_the_handler() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let status =
        kubelet.runtime.status(cri::StatusRequest { verbose: false }).await.unwrap().into_inner();
    let handlers: Vec<_> =
        status.runtime_handlers.iter().map(|handler| handler.name.as_str()).collect();
    assert!(handlers.contains(&"kiyot") && handlers.contains(&""), "{handlers:?}");
    assert!(status.status.unwrap().conditions.len() >= 2);
}
