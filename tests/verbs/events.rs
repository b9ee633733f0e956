//! Container events (`GetContainerEvents`).

use futures::{Stream, StreamExt};
use kiyot::backends::Method;
use kiyot_proto::cri::{
    self,
    ContainerEventType::{
        ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted,
        ContainerStartedEvent as Started, ContainerStoppedEvent as Stopped,
    },
};
use prost::Message;
use tonic::Status;

use crate::kit::{Fixture, LIMIT};

/// Reads the next event, and then the statuses. A status must be as new as the event, or newer.
async fn next(
    kiyot: &Fixture,
    events: &mut (impl Stream<Item = Result<bytes::Bytes, Status>> + Unpin),
) -> cri::ContainerEventResponse {
    let event = tokio::time::timeout(LIMIT, events.next()).await.unwrap().unwrap().unwrap();
    let event = cri::ContainerEventResponse::decode(event).unwrap();
    for told in &event.containers_statuses {
        if let Ok(now) = kiyot.status(&told.id) {
            assert!(now.state >= told.state, "{now:?} came before {told:?}");
            if now.state == told.state {
                assert_eq!(&now, told);
            }
        }
    }
    event
}

/// Verifies F10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_a_pod_have_the_order_of_its_life() {
    let kiyot = Fixture::start().await;
    let mut events = kiyot.daemon.cri.events();
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&container).await;
    kiyot.provider.only().exit("c0", 3);
    kiyot.exited(&container).await;
    let failing = kiyot.create(&sandbox, "other").await;
    kiyot.start_container(&failing).await;
    // Its cell ends by itself, and all containers end with it.
    kiyot.provider.crash();
    kiyot.exited(&failing).await;
    let remove = cri::RemoveContainerRequest { container_id: container.clone() };
    kiyot.call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove).await.unwrap();
    let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    kiyot.call::<cri::RemovePodSandboxResponse>(Method::RemovePodSandbox, remove).await.unwrap();

    let expected = [
        (Created, &sandbox),
        (Started, &sandbox),
        (Created, &container),
        (Started, &container),
        (Stopped, &container),
        (Created, &failing),
        (Started, &failing),
        (Stopped, &failing),
        (Stopped, &sandbox),
        (Deleted, &container),
        (Deleted, &failing),
        (Deleted, &sandbox),
    ];
    let mut last = 0;
    for (kind, id) in expected {
        let event = next(&kiyot, &mut events).await;
        assert_eq!((event.container_event_type(), &event.container_id), (kind, id));
        let pod = event.pod_sandbox_status.unwrap();
        assert_eq!((&pod.id, &*pod.metadata.unwrap().uid), (&sandbox, "uid-web"));
        assert!(event.created_at >= last, "times never go back");
        last = event.created_at;
        let own = event.containers_statuses.iter().find(|status| status.id == *id);
        match kind {
            Created => assert!(id == &sandbox || own.is_some()),
            Stopped if id == &container => {
                assert_eq!(own.unwrap().exit_code, 3);
                assert!((own.unwrap().started_at..=last).contains(&own.unwrap().finished_at));
            }
            Stopped if id == &failing => {
                assert_eq!((own.unwrap().exit_code, &*own.unwrap().reason), (137, "CellLost"))
            }
            Deleted => assert_eq!(own, None),
            _ => {}
        }
    }
}
