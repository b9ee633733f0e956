//! The life of a pod under a kubelet.

use kiyot::backends::Method;
use kiyot_config::WarmPool;
use kiyot_engine::provider::owner;
use kiyot_proto::cri::{self, security_profile::ProfileType};
use kiyot_testkit::{
    fake_cell::{IMAGE, REFERENCE},
    wait_for,
};
use tonic::Code;

use crate::kit::Fixture;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_runs_from_sandbox_to_removal() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    assert_eq!(sandbox.len(), 64);
    let cell = kiyot.provider.only();
    let status = kiyot.sandbox_status(&sandbox).unwrap();
    assert_eq!(status.network.unwrap().ip, "10.200.0.2");
    assert_eq!(status.runtime_handler, "kiyot");
    let (bound, told) =
        cell.with(|state| (state.bound.clone().unwrap(), state.sandbox.clone().unwrap()));
    assert_eq!((&*bound.hostname, &*bound.pod_uid), ("web", "uid-web"));
    assert_eq!((&*told.runtime_handler, &*told.config.unwrap().hostname), ("", ""));

    let container = kiyot.create(&sandbox, "main").await;
    let created = cell.with(|state| state.created[0].clone());
    assert_eq!(created.pod_sandbox_id, "5a");
    let config = created.config.unwrap();
    assert_eq!(
        (&*config.image.unwrap().image, config.envs[0].value.as_slice()),
        (IMAGE, b"secret".as_slice())
    );
    let status = kiyot.status(&container).unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerCreated);
    assert_eq!((&*status.image_ref, &*status.image_id), (REFERENCE, IMAGE));

    kiyot.start_container(&container).await;
    let log = kiyot.dir.path().join("log/main.log");
    assert!(log.exists(), "the log's file exists when StartContainer answers");
    let status = kiyot.status(&container).unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    assert!(status.started_at >= status.created_at);

    let exec = cri::ExecSyncRequest {
        container_id: container.clone(),
        cmd: vec!["true".to_owned()],
        timeout: 5,
    };
    let answer: cri::ExecSyncResponse = kiyot.call(Method::ExecSync, exec.clone()).await.unwrap();
    assert_eq!(answer.stdout, b"done");
    assert_eq!(cell.with(|state| state.container_ids["ExecSync"].clone()), "c0");
    let status = kiyot
        .call::<cri::ExecSyncResponse>(
            Method::ExecSync,
            cri::ExecSyncRequest { cmd: vec!["fail".to_owned()], ..exec },
        )
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::DeadlineExceeded, &*format!("container {container} is slow"))
    );

    cell.write("c0", "first line\n");
    cell.write("c0", "last words\n");
    cell.exit("c0", 3);
    let status = kiyot.exited(&container).await;
    assert_eq!((status.exit_code, &*status.reason), (3, "Error"));
    assert!(status.finished_at >= status.started_at);
    assert_eq!(
        std::fs::read_to_string(&log).unwrap(),
        "first line\nlast words\n",
        "the log is complete before the end is reported"
    );

    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!(kiyot.provider.running(), 0);
    assert_eq!(
        kiyot.sandbox_status(&sandbox).unwrap().state(),
        cri::PodSandboxState::SandboxNotready
    );
    assert_eq!(kiyot.status(&container).unwrap().exit_code, 3);
    let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    for _ in 0..2 {
        kiyot
            .call::<cri::RemovePodSandboxResponse>(Method::RemovePodSandbox, remove.clone())
            .await
            .unwrap();
    }
    assert!(kiyot.sandboxes().is_empty() && kiyot.containers().is_empty());
    assert_eq!(kiyot.sandbox_status(&sandbox).unwrap_err().code(), Code::NotFound);
}

/// Verifies P16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launch_has_tags_of_its_owner_and_of_its_pod() {
    let kiyot = Fixture::start().await;
    let mut request = kiyot.sandbox_request("web");
    let labels = &mut request.config.as_mut().unwrap().labels;
    labels.insert("app".to_owned(), "checkout".to_owned());
    labels.insert(owner::NODE.to_owned(), "forged".to_owned());
    let _: cri::RunPodSandboxResponse = kiyot.call(Method::RunPodSandbox, request).await.unwrap();
    let tags = kiyot.provider.tags.lock().unwrap().clone();
    let of = |key: &str| tags[key].as_str();
    assert_eq!((of(owner::CLUSTER), of(owner::NODE)), ("production", "worker-1"));
    assert_eq!(of(owner::FINGERPRINT).len(), 64, "a SHA-256 in hexadecimal");
    assert_eq!(of(owner::NAME), "shop/web");
    assert_eq!((of(owner::NAMESPACE), of(owner::POD), of("app")), ("shop", "web", "checkout"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_container_reads_exited_at_the_response() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&container).await;
    let stop = cri::StopContainerRequest { container_id: container.clone(), timeout: 1 };
    kiyot.call::<cri::StopContainerResponse>(Method::StopContainer, stop).await.unwrap();
    let status = kiyot.status(&container).unwrap();
    assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 143));
    let remove = cri::RemoveContainerRequest { container_id: container.clone() };
    kiyot.call::<cri::RemoveContainerResponse>(Method::RemoveContainer, remove).await.unwrap();
    assert!(kiyot.containers().is_empty());
    assert!(kiyot.provider.only().with(|state| state.containers.is_empty()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_recovers_the_pod_with_the_events_meanwhile() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let (stays, ends) =
        (kiyot.create(&sandbox, "stays").await, kiyot.create(&sandbox, "ends").await);
    kiyot.start_container(&stays).await;
    kiyot.start_container(&ends).await;
    let before = (kiyot.sandboxes(), kiyot.status(&stays).unwrap());
    let cell = kiyot.provider.only();

    let kiyot = kiyot.restart().await;
    assert_eq!((kiyot.sandboxes(), kiyot.status(&stays).unwrap()), before);
    cell.write("c1", "while nobody looked\n");
    cell.exit("c1", 9);
    assert_eq!(kiyot.exited(&ends).await.exit_code, 9);
    assert_eq!(
        std::fs::read_to_string(kiyot.dir.path().join("log/ends.log")).unwrap(),
        "while nobody looked\n"
    );
    assert_eq!(kiyot.status(&stays).unwrap().state(), cri::ContainerState::ContainerRunning);
    cell.write("c0", "goes on\n");
    let log = kiyot.dir.path().join("log/stays.log");
    wait_for("the log to go on", || {
        std::fs::read_to_string(&log).is_ok_and(|log| log == "goes on\n")
    })
    .await;
    assert_eq!(kiyot.provider.launched(), 1);
}

/// Verifies I6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_of_a_cell_is_reported_while_its_pod_runs() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let told = |reference: &str| kiyot.daemon.cri.reported_image(reference).is_some();
    // The pause image is the cell's own, not the pod's.
    assert_eq!(["pause", "busybox", IMAGE].map(told), [false; 3]);
    kiyot.create(&sandbox, "main").await;
    assert_eq!(["pause", "busybox", IMAGE].map(told), [false, true, true]);
    kiyot.stop_sandbox(&sandbox).await;
    assert_eq!(["pause", "busybox", IMAGE].map(told), [false; 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_calls_of_the_pod_are_owned() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let annotations = kiyot.sandbox_status(&sandbox).unwrap().annotations;
    let image = cri::ImageSpec { image: "busybox".to_owned(), annotations, ..Default::default() };
    let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
    let owns = |request: &cri::ImageStatusRequest| {
        kiyot.daemon.cri.owns_image(Method::ImageStatus, &prost::Message::encode_to_vec(request))
    };
    assert!(owns(&request));
    let answer: cri::ImageStatusResponse =
        kiyot.call(Method::ImageStatus, request.clone()).await.unwrap();
    assert_eq!(answer.image.unwrap().id, IMAGE);
    let mut other = request;
    other.image.as_mut().unwrap().annotations.clear();
    assert!(!owns(&other));
}

/// Verifies U23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_details_of_a_container_survive_a_restart() {
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    let cell = kiyot.provider.only();
    let resources = |memory_limit_in_bytes| {
        let linux = cri::LinuxContainerResources { memory_limit_in_bytes, ..Default::default() };
        Some(cri::ContainerResources { linux: Some(linux), ..Default::default() })
    };
    let user = Some(cri::ContainerUser {
        linux: Some(cri::LinuxContainerUser { uid: 7, ..Default::default() }),
    });
    cell.with(|state| {
        let status = state.containers.get_mut("c0").unwrap();
        (status.resources, status.user) = (resources(64), user.clone());
    });
    kiyot.start_container(&container).await;
    let told = |kiyot: &Fixture| {
        let status = kiyot.status(&container).unwrap();
        (status.state(), status.resources, status.user)
    };
    assert_eq!(told(&kiyot), (cri::ContainerState::ContainerRunning, resources(64), user.clone()));
    // A kubelet resizes the container.
    cell.with(|state| state.containers.get_mut("c0").unwrap().resources = resources(128));
    let update = cri::UpdateContainerResourcesRequest {
        container_id: container.clone(),
        ..Default::default()
    };
    kiyot
        .call::<cri::UpdateContainerResourcesResponse>(Method::UpdateContainerResources, update)
        .await
        .unwrap();
    assert_eq!(told(&kiyot).1, resources(128));
    // Its cell is silent now.
    cell.with(|state| state.unanswered.push("Watch"));
    let kiyot = kiyot.restart().await;
    assert_eq!(told(&kiyot), (cri::ContainerState::ContainerRunning, resources(128), user.clone()));
    // The details stay after the exit, also if the daemon reports it.
    kiyot.provider.crash();
    kiyot.exited(&container).await;
    let kiyot = kiyot.restart().await;
    assert_eq!(told(&kiyot), (cri::ContainerState::ContainerExited, resources(128), user));
}

/// Verifies U14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seccomp_profile_of_a_sandbox_is_that_of_its_copy_in_the_cell() {
    let kiyot = Fixture::start().await;
    let profile = kiyot.dir.path().join("profile.json").to_str().unwrap().to_owned();
    std::fs::write(&profile, "{}").unwrap();
    let request = |name: &str, path: &str| {
        let mut request = kiyot.sandbox_request(name);
        let linux = request.config.as_mut().unwrap().linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().seccomp = Some(cri::SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: path.to_owned(),
        });
        request
    };
    let run = async |request| {
        kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request).await
    };
    run(request("web", &profile)).await.unwrap();
    let sent = kiyot.provider.only().with(|state| state.sandbox.clone().unwrap());
    let context = sent.config.unwrap().linux.unwrap().security_context.unwrap();
    let sent = context.seccomp.unwrap();
    assert_eq!(sent.profile_type(), ProfileType::Localhost);
    assert!(sent.localhost_ref.starts_with("/cell/pod/seccomp/"), "{sent:?}");

    let missing = "/no/such/profile.json";
    let status = run(request("other", missing)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains(missing), "{status}");
    assert_eq!((kiyot.provider.running(), kiyot.sandboxes().len()), (1, 1));
}

/// Verifies A28.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warm_cell_has_run_a_sandbox_with_a_container_before_a_pod_takes_it() {
    let kiyot = Fixture::start().await;
    kiyot.daemon.cells.set_warm(&[WarmPool { count: 1, ..WarmPool::default() }]);
    wait_for("a cell is warm", || {
        kiyot.sample("kiyot_warm_pool_cells{state=\"idle\"}") == Some(1.0)
    })
    .await;
    let cell = kiyot.provider.only();
    wait_for("the cell has rehearsed", || {
        cell.with(|state| !state.created.is_empty() && state.sandbox.is_none())
    })
    .await;
    assert!(cell.with(|state| state.containers.is_empty()));
    // No list has the rehearsal, and the pod that takes the cell is the cell's first pod.
    assert_eq!((kiyot.sandboxes(), kiyot.containers()), (Vec::new(), Vec::new()));
    let sandbox = kiyot.run("web").await;
    let container = kiyot.create(&sandbox, "main").await;
    assert_eq!(kiyot.sandboxes().len(), 1);
    assert_eq!(kiyot.status(&container).unwrap().id, container);
    let names = cell.with(|state| {
        let of = |request: &cri::CreateContainerRequest| request.config.clone().unwrap();
        state.created.iter().map(|request| of(request).metadata.unwrap().name).collect::<Vec<_>>()
    });
    assert_eq!(names, ["rehearsal", "main"]);
}
