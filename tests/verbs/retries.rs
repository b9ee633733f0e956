//! Callers that leave and retry.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kiyot::backends::Method;
use kiyot_config::ProviderKind;
use kiyot_engine::request::keys::{INSTANCE_TYPE, PROVIDER};
use kiyot_proto::{
    cell::{self, event::Event},
    cri,
};
use kiyot_testkit::wait_for;
use prost::Message;
use tonic::Code;

use crate::kit::Fixture;

/// Verifies P2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_joins_the_launch_and_gets_its_sandbox() {
    let kiyot = Fixture::start().await;
    kiyot.provider.hold_launches();
    let mut request = kiyot.sandbox_request("web");
    let first = kiyot
        .daemon
        .cri
        .call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now()))
        .await;
    assert_eq!(first.unwrap_err().code(), Code::DeadlineExceeded);
    // Labels and annotations may change while a pod runs. They cause no other launch or sandbox.
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

/// Verifies P18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_annotation_replaces_a_launch_and_no_running_sandbox() {
    let kiyot = Fixture::start().await;
    kiyot.provider.hold_launches();
    let mut request = kiyot.sandbox_request("web");
    let of_type = |request: &mut cri::RunPodSandboxRequest, instance_type: &str| {
        let annotations = &mut request.config.as_mut().unwrap().annotations;
        annotations.insert(INSTANCE_TYPE.to_owned(), instance_type.to_owned());
    };
    of_type(&mut request, "c5.large");
    let mut changed = request.clone();
    of_type(&mut changed, "c5.xlarge");
    let run = |request: &cri::RunPodSandboxRequest| {
        kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone())
    };
    let first = async {
        let outcome = run(&request).await;
        kiyot.provider.gate.add_permits(10);
        outcome
    };
    let second = async {
        wait_for("the launch is pending", || !kiyot.daemon.cells.all().is_empty()).await;
        run(&changed).await
    };
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first.unwrap_err(), second.unwrap());
    assert!(first.message().contains("its pod was changed"), "{first}");
    assert_eq!((kiyot.provider.launched(), kiyot.provider.most()), (2, 1));
    // The machine of a running sandbox is fixed.
    assert_eq!(run(&request).await.unwrap(), second);
    assert_eq!(kiyot.provider.launched(), 2);
}

/// Verifies A37.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_rule_replaces_a_launch_and_no_running_sandbox() {
    const NODE: (&str, &[ProviderKind]) = ("batch", &[ProviderKind::Qemu]);
    const CLOUD: (&str, &[ProviderKind]) = ("batch", &[ProviderKind::Ec2]);
    let kiyot = Fixture::start().await;
    kiyot.provider.hold_launches();
    let request = kiyot.sandbox_request("web");
    let first = async {
        let outcome = kiyot.run_by_rule(request.clone(), NODE).await;
        kiyot.provider.gate.add_permits(10);
        outcome
    };
    let second = async {
        wait_for("the launch is pending", || !kiyot.daemon.cells.all().is_empty()).await;
        kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone()).await
    };
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first.unwrap_err(), second.unwrap());
    assert!(first.message().contains("its pod was changed"), "{first}");
    assert_eq!((kiyot.provider.launched(), kiyot.provider.most()), (2, 1));
    // The cell of a running sandbox stays.
    assert_eq!(kiyot.run_by_rule(request.clone(), NODE).await.unwrap(), second);
    let mut other = kiyot.sandbox_request("other");
    let refused = kiyot.run_by_rule(other.clone(), CLOUD).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let excluded = "no provider has a cell for the pod: qemu: the routing rule \"batch\" allows \
                    \"ec2\"";
    assert_eq!(refused.message(), excluded);
    let annotations = &mut other.config.as_mut().unwrap().annotations;
    annotations.insert(PROVIDER.to_owned(), "netns".to_owned());
    let refused = kiyot.run_by_rule(other, CLOUD).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let both = "pod.elotl.co/provider asks for \"netns\", and the routing rule \"batch\" allows \
                \"ec2\"";
    assert_eq!(refused.message(), both);
    assert_eq!(kiyot.provider.launched(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphan_sandbox_is_removed() {
    let kiyot = Fixture::with_owner_timeout(Duration::from_millis(50)).await;
    let request = kiyot.sandbox_request("web");
    let gone = kiyot
        .daemon
        .cri
        .call(Method::RunPodSandbox, request.encode_to_vec().into(), Some(Instant::now()))
        .await;
    assert_eq!(gone.unwrap_err().code(), Code::DeadlineExceeded);
    wait_for("the launch", || kiyot.provider.launched() == 1).await;
    wait_for("the end of the abandoned sandbox", || {
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
async fn sandbox_that_is_used_during_the_removal_of_another_stays() {
    const ABANDONED: usize = 4;
    let kiyot = Fixture::with_owner_timeout(Duration::from_millis(500)).await;
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
    wait_for("the first end", || kiyot.provider.asked_to_end.load(Ordering::SeqCst) == 1).await;
    wait_for("all sandboxes are listed", || kiyot.sandboxes().len() == ABANDONED).await;
    let sandboxes = kiyot.sandboxes();
    for sandbox in &sandboxes {
        kiyot.sandbox_status(&sandbox.id).unwrap();
    }
    kiyot.provider.way_out.add_permits(10);
    wait_for("the first removal", || kiyot.sandboxes().len() == ABANDONED - 1).await;
    // When a later orphan sandbox is removed, the owner timeout of the other sandboxes has passed.
    abandon("last".to_owned()).await;
    wait_for("the end of the last", || {
        kiyot.provider.asked_to_end.load(Ordering::SeqCst) >= 2
            && kiyot.sandboxes().len() < ABANDONED
    })
    .await;
    let left = kiyot.sandboxes();
    assert_eq!(
        (left.len(), kiyot.provider.running()),
        (ABANDONED - 1, ABANDONED - 1),
        "the kubelet has asked for these sandboxes"
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
    // The container has exited, so that its record is removed before the daemon knows that the
    // agent has ended.
    kiyot
        .call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove(&done))
        .await
        .unwrap();
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

/// A stop first ends the sandbox in its cell, and then the cell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_that_ends_during_its_stop_reads_ready_until_the_end_is_confirmed() {
    const USED: u64 = 1_000_000_007;
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let permits = kiyot.provider.way_out.available_permits();
    kiyot.provider.way_out.forget_permits(permits);
    let cell = kiyot.provider.only();
    let mut stopping = std::pin::pin!(kiyot.stop_sandbox(&sandbox));
    let processed = async {
        wait_for("the termination", || kiyot.provider.asked_to_end.load(Ordering::SeqCst) == 1)
            .await;
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let cpu = Some(cri::CpuUsage {
            timestamp: i64::try_from(timestamp).unwrap(),
            usage_core_nano_seconds: Some(cri::UInt64Value { value: USED }),
            ..Default::default()
        });
        let linux = Some(cri::LinuxPodSandboxStats { cpu, ..Default::default() });
        cell.with(|state| {
            state.tell(Event::SandboxGone("5a".to_owned()));
            // The next event shows that this one is processed.
            state.tell(Event::Heartbeat(cell::Heartbeat {
                sandbox: Some(cri::PodSandboxStats { linux, ..Default::default() }),
                ..Default::default()
            }));
        });
        let used = || {
            let list: cri::ListPodSandboxStatsResponse = kiyot
                .cached(Method::ListPodSandboxStats, cri::ListPodSandboxStatsRequest::default())
                .unwrap();
            let linux = list.stats.into_iter().next()?.linux?;
            Some(linux.cpu?.usage_core_nano_seconds?.value)
        };
        wait_for("the heartbeat", || !is_ready(&kiyot, &sandbox) || used() == Some(USED)).await;
        assert!(is_ready(&kiyot, &sandbox), "the end of its cell is not confirmed");
        kiyot.provider.way_out.add_permits(10);
    };
    tokio::join!(&mut stopping, processed);
    assert!(!is_ready(&kiyot, &sandbox));
}

fn is_ready(kiyot: &Fixture, sandbox: &str) -> bool {
    let status = kiyot.sandbox_status(sandbox).unwrap();
    status.state() == cri::PodSandboxState::SandboxReady
}

/// Verifies P23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_with_the_uid_of_another_is_refused_at_once() {
    let kiyot = Fixture::start().await;
    kiyot.provider.hold_launches();
    let web = kiyot.sandbox_request("web");
    let mut other = kiyot.sandbox_request("other");
    let metadata = other.config.as_mut().unwrap().metadata.as_mut().unwrap();
    metadata.uid = "uid-web".to_owned();
    let run = |request: &cri::RunPodSandboxRequest| {
        kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request.clone())
    };
    let refused = async |state: &str| {
        let refused = run(&other).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for part in ["uid \"uid-web\" of pod shop/other", "pod shop/web, which", state] {
            assert!(refused.message().contains(part), "{part} is not in {refused}");
        }
    };
    let second = async {
        wait_for("the launch is pending", || !kiyot.daemon.cells.all().is_empty()).await;
        refused("starts").await;
        kiyot.provider.gate.add_permits(10);
    };
    let (first, ()) = tokio::join!(run(&web), second);
    let sandbox = first.unwrap().pod_sandbox_id;
    refused(&format!("has {sandbox}")).await;
    assert_eq!(kiyot.provider.launched(), 1);
    // A stopped pod does not occupy the uid.
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox };
    let _: cri::StopPodSandboxResponse = kiyot.call(Method::StopPodSandbox, stop).await.unwrap();
    run(&other).await.unwrap();
    assert_eq!((kiyot.provider.launched(), kiyot.provider.running()), (2, 1));
}
