//! Container events.

use super::{super::events, *};

/// Reads events: type, id, and the states of the pod and of its containers.
async fn events(
    reader: &mut events::Events,
    count: usize,
) -> Vec<(cri::ContainerEventType, String, bool, Vec<(String, cri::ContainerState)>)> {
    let mut came = Vec::new();
    for _ in 0..count {
        let event = cri::ContainerEventResponse::decode(reader.next().await.unwrap()).unwrap();
        let pod = event.pod_sandbox_status.clone().unwrap();
        assert!(event.created_at > 0 && pod.metadata.as_ref().unwrap().uid.starts_with("uid-"));
        let containers = event
            .containers_statuses
            .iter()
            .map(|status| (status.id.clone(), status.state()))
            .collect();
        came.push((
            event.container_event_type(),
            event.container_id,
            pod.state() == cri::PodSandboxState::SandboxReady,
            containers,
        ));
    }
    came
}

/// Verifies F10.
#[tokio::test]
async fn each_transition_is_an_event() {
    use cri::{
        ContainerEventType::{
            ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted,
            ContainerStartedEvent as Started, ContainerStoppedEvent as Stopped,
        },
        ContainerState::{ContainerCreated, ContainerExited, ContainerRunning},
    };
    let pods = Pods::new();
    let (mut reader, mut other) = (pods.events(), pods.events());
    let pod = pods.insert_sandbox(&sandbox_meta(&id("pod"), 1), true).unwrap();
    let status = |state: cri::ContainerState, started_unix_nanos| store::ContainerStatus {
        state: state.into(),
        started_unix_nanos,
        ..Default::default()
    };
    let ids: Vec<_> =
        ["one", "two", "six"].map(|name| ContainerId::parse(&id(name)).unwrap()).into();
    for (n, container) in ids.iter().enumerate() {
        let told = cri::ContainerStatus {
            resources: Some(cri::ContainerResources::default()),
            ..Default::default()
        };
        let meta = container_meta(container.as_str(), pod.as_str(), n as u32);
        assert!(
            pods.insert_container(&meta, store::ContainerStatus::default(), Some(&told)).unwrap()
        );
    }
    let (one, two, six) = (&ids[0], &ids[1], &ids[2]);
    pods.set_status(one, status(ContainerRunning, 5));
    // A moved log does not change the state.
    pods.set_status(one, store::ContainerStatus { log_base: 7, ..status(ContainerRunning, 5) });
    pods.set_status(one, status(ContainerExited, 5));
    pods.set_status(one, status(ContainerExited, 5));
    // An exit without a reported start, and a failed start.
    pods.set_status(two, status(ContainerExited, 6));
    pods.set_status(six, status(ContainerExited, 0));
    pods.remove_container(one);
    pods.remove_container(one);
    pods.set_ready(&pod, false);
    pods.set_ready(&pod, false);
    pods.remove_sandbox(&pod);
    pods.remove_sandbox(&pod);

    let all = |states: &[(&ContainerId, cri::ContainerState)]| {
        states.iter().map(|(id, state)| (id.as_str().to_owned(), *state)).collect::<Vec<_>>()
    };
    let exited = all(&[(two, ContainerExited), (six, ContainerExited)]);
    let expected = [
        (Created, pod.as_str(), true, vec![]),
        (Started, pod.as_str(), true, vec![]),
        (Created, one.as_str(), true, all(&[(one, ContainerCreated)])),
        (Created, two.as_str(), true, all(&[(one, ContainerCreated), (two, ContainerCreated)])),
        (
            Created,
            six.as_str(),
            true,
            all(&[(one, ContainerCreated), (two, ContainerCreated), (six, ContainerCreated)]),
        ),
        (
            Started,
            one.as_str(),
            true,
            all(&[(one, ContainerRunning), (two, ContainerCreated), (six, ContainerCreated)]),
        ),
        (
            Stopped,
            one.as_str(),
            true,
            all(&[(one, ContainerExited), (two, ContainerCreated), (six, ContainerCreated)]),
        ),
        (
            Started,
            two.as_str(),
            true,
            all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerCreated)]),
        ),
        (
            Stopped,
            two.as_str(),
            true,
            all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerCreated)]),
        ),
        (
            Stopped,
            six.as_str(),
            true,
            all(&[(one, ContainerExited), (two, ContainerExited), (six, ContainerExited)]),
        ),
        (Deleted, one.as_str(), true, exited.clone()),
        (Stopped, pod.as_str(), false, exited),
        (Deleted, two.as_str(), false, all(&[(six, ContainerExited)])),
        (Deleted, six.as_str(), false, vec![]),
        (Deleted, pod.as_str(), false, vec![]),
    ];
    let expected: Vec<_> = expected
        .into_iter()
        .map(|(kind, id, ready, containers)| (kind, id.to_owned(), ready, containers))
        .collect();
    assert_eq!(events(&mut reader, expected.len()).await, expected);
    assert_eq!(events(&mut other, expected.len()).await, expected);
    assert!(tokio::time::timeout(Duration::ZERO, reader.next()).await.is_err(), "no more events");
}

#[tokio::test]
async fn event_has_the_status_that_is_read_after_it() {
    let (pods, one, _, container) = example();
    let mut reader = pods.events();
    pods.set_status(
        &container,
        store::ContainerStatus { state: 2, exit_code: 3, finished_unix_nanos: 9, ..running() },
    );
    let event = cri::ContainerEventResponse::decode(reader.next().await.unwrap()).unwrap();
    assert_eq!(event.containers_statuses, [pods.container(container.as_str()).unwrap().answer()]);
    let sandbox = pods.sandbox(one.as_str()).unwrap();
    assert_eq!(
        event.pod_sandbox_status,
        Some(super::super::response::sandbox_status(&sandbox.meta(), true))
    );
}

/// Verifies F9.
#[tokio::test]
async fn subscriber_that_is_too_far_behind_reads_an_error() {
    // By the number of events, and by their size: a pod with long annotations.
    for (long, changes) in [(false, events::MAX_QUEUED_EVENTS + 10), (true, 20)] {
        let pods = Pods::new();
        let mut meta = sandbox_meta(&id("pod"), 1);
        if long {
            meta.config
                .as_mut()
                .unwrap()
                .annotations
                .insert("long".to_owned(), "x".repeat(events::MAX_QUEUED_BYTES / 10));
        }
        let pod = pods.insert_sandbox(&meta, true).unwrap();
        let (mut slow, mut quick, gone) = (pods.events(), pods.events(), pods.events());
        drop(gone);
        for _ in 0..changes {
            pods.set_ready(&pod, false);
            pods.set_ready(&pod, true);
            assert_eq!(events(&mut quick, 1).await.len(), 1, "a quick subscriber reads all");
        }
        let (mut read, mut bytes) = (0, 0);
        let error = loop {
            match slow.next().await {
                Ok(event) => (read, bytes) = (read + 1, bytes + event.len()),
                Err(error) => break error,
            }
        };
        let message = error.to_string();
        assert!(message.contains("1024") && message.contains("8388608"), "{message}");
        assert_eq!(read, if long { 9 } else { events::MAX_QUEUED_EVENTS });
        assert!(bytes <= events::MAX_QUEUED_BYTES);
        assert!(slow.next().await.is_err(), "no more events");
    }
}
