//! What containers use, when their cell does not say it.

use kiyot::backends::Method;
use kiyot_proto::cri;

use crate::kit::{Fixture, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_is_listed_when_its_start_is_answered() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let list = || kiyot.at_once::<cri::ListContainerStatsResponse>(Method::ListContainerStats, cri::ListContainerStatsRequest::default());
    // Its played containerd knows no statistics, and there are no heartbeats.
    let container = kiyot.create(&sandbox, "main").await;
    assert!(list().unwrap().stats.is_empty());
    kiyot.start_container(&container).await;
    let stats = list().unwrap().stats;
    let [only] = stats.as_slice() else { panic!("{stats:?}") };
    assert_eq!(only.attributes.as_ref().unwrap().id, container);
    assert_eq!((only.cpu.unwrap().timestamp, only.cpu.unwrap().usage_core_nano_seconds), (100, Some(cri::UInt64Value { value: 0 })));
    // What it says is told at once.
    kiyot.provider.only().with(|state| state.used = Some(42));
    let other = kiyot.create(&sandbox, "other").await;
    kiyot.start_container(&other).await;
    let request = cri::ContainerStatsRequest { container_id: other.clone() };
    let stats = || kiyot.at_once::<cri::ContainerStatsResponse>(Method::ContainerStats, request.clone()).unwrap().stats.unwrap();
    assert_eq!(stats().cpu.unwrap().usage_core_nano_seconds, Some(cri::UInt64Value { value: 42 }));
    // What has ended is in no list; asked for by its id it is named, and uses nothing.
    kiyot.provider.only().exit("c1", 0);
    until("the usage ends with the container", || list().unwrap().stats.len() == 1).await;
    assert_eq!((stats().attributes.unwrap().id, stats().cpu, stats().memory), (other, None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_listed_when_its_sandbox_is_answered_and_has_its_containers_when_they_start() {
    let kiyot = Fixture::start().await;
    let list =
        || kiyot.at_once::<cri::ListPodSandboxStatsResponse>(Method::ListPodSandboxStats, cri::ListPodSandboxStatsRequest::default()).unwrap().stats;
    assert!(list().is_empty());
    let sandbox = kiyot.run("web").await;
    let [stats] = list().try_into().unwrap();
    let (attributes, linux) = (stats.attributes.unwrap(), stats.linux.unwrap());
    assert_eq!((attributes.id.as_str(), attributes.metadata.unwrap().name.as_str()), (sandbox.as_str(), "web"));
    // Its played containerd knows no statistics, and there are no heartbeats.
    assert_eq!(linux.cpu.unwrap().usage_core_nano_seconds, Some(cri::UInt64Value { value: 0 }));
    assert_eq!(linux.memory.unwrap().working_set_bytes, Some(cri::UInt64Value { value: 0 }));
    assert!(linux.cpu.unwrap().timestamp > 0 && linux.containers.is_empty());
    let container = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&container).await;
    let containers = || list().remove(0).linux.unwrap().containers;
    let [only] = containers().try_into().unwrap();
    assert_eq!(only.attributes.unwrap().id, container);
    kiyot.provider.only().exit("c0", 0);
    until("the usage ends with the container", || containers().is_empty()).await;
}
