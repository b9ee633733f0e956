//! Hostile cells: their reports are refused or bounded, and affect no other pod.

use std::time::Instant;

use futures::StreamExt;
use kiyot::backends::Method;
use kiyot_link::{
    channel::MAX_MESSAGE_BYTES,
    log_limit::{MAX_LINES, PERIOD},
};
use kiyot_proto::{cell, cri};
use kiyot_testkit::{fake_cell::IMAGE, log::CapturedLog, wait_for};
use prost::Message;
use tonic::{Code, Status};

use crate::kit::{Fixture, LIMIT};

/// Runs two pods with a container each, and returns the ids of both containers. Both are `c0` in
/// their cells.
async fn honest_and_liar(kiyot: &Fixture) -> (String, String) {
    let mut containers = Vec::new();
    for name in ["honest", "liar"] {
        let sandbox = kiyot.run(name).await;
        let mut request = kiyot.container_request(&sandbox, "main");
        request.sandbox_config = kiyot.sandbox_request(name).config;
        let made: cri::CreateContainerResponse =
            kiyot.call(Method::CreateContainer, request).await.unwrap();
        containers.push(made.container_id);
    }
    // The containers start after both exist, so that "c0" is unambiguous.
    for container in &containers {
        kiyot.start_container(container).await;
    }
    (containers[0].clone(), containers[1].clone())
}

/// Returns the id of the sandbox of the pod with this name.
fn sandbox_of(kiyot: &Fixture, name: &str) -> String {
    let has_name = |sandbox: &cri::PodSandbox| sandbox.metadata.as_ref().unwrap().name == name;
    kiyot.sandboxes().into_iter().find(has_name).unwrap().id
}

fn exec(container: &str) -> cri::ExecSyncRequest {
    cri::ExecSyncRequest {
        container_id: container.to_owned(),
        cmd: vec!["true".to_owned()],
        timeout: 5,
    }
}

async fn is_well(kiyot: &Fixture, container: &str) {
    assert_eq!(kiyot.status(container).unwrap().state(), cri::ContainerState::ContainerRunning);
    assert_eq!(
        kiyot
            .call::<cri::ExecSyncResponse>(Method::ExecSync, exec(container))
            .await
            .unwrap()
            .stdout,
        b"done"
    );
}

/// Verifies L8, P11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_on_ids_of_other_cells_have_no_effect() {
    let kiyot = Fixture::start().await;
    let (honest, liar) = honest_and_liar(&kiyot).await;
    let (its_cell, lying) = (kiyot.provider.nth(0), kiyot.provider.nth(1));
    its_cell.write("c0", "honest line\n");
    let before = kiyot.status(&honest).unwrap();
    let exited = |id: &str| {
        let mut status = cri::ContainerStatus {
            id: id.to_owned(),
            exit_code: 66,
            finished_at: 1,
            ..Default::default()
        };
        status.set_state(cri::ContainerState::ContainerExited);
        status
    };
    let usage = |id: &str| cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes { id: id.to_owned(), ..Default::default() }),
        cpu: Some(cri::CpuUsage { timestamp: 6, ..Default::default() }),
        ..Default::default()
    };
    let log = its_cell
        .with(|state| format!("logs/{}", state.created[0].config.as_ref().unwrap().log_path));
    lying.with(|state| {
        use cell::event::Event;
        for id in [honest.as_str(), "c1", "", "../c0"] {
            state.tell(Event::Container(exited(id)));
            state.tell(Event::ContainerGone(id.to_owned()));
            state.tell(Event::SandboxGone(id.to_owned()));
            state.tell(Event::Sandbox(cri::PodSandboxStatus {
                id: id.to_owned(),
                state: 1,
                ..Default::default()
            }));
            state.tell(Event::Heartbeat(cell::Heartbeat {
                containers: vec![usage(id)],
                ..Default::default()
            }));
        }
        for path in [log.as_str(), "../../etc/passwd", "/etc/passwd"] {
            state.tell(Event::Log(cell::LogGrown { path: path.to_owned(), size: u64::MAX }));
        }
        for n in 0..5_000 {
            state.tell(Event::Container(exited(&format!("c{}", n + 1))));
        }
    });
    // A report on its own container has effect. Events are applied in order.
    lying.exit("c0", 3);
    assert_eq!(kiyot.exited(&liar).await.exit_code, 3);
    is_well(&kiyot, &honest).await;
    assert_eq!(kiyot.status(&honest).unwrap(), before);
    assert_eq!(
        (kiyot.containers().len(), kiyot.sandboxes().len()),
        (2, 2),
        "the report created nothing"
    );
    let file = kiyot.dir.path().join("log/main.log");
    wait_for("the log has what the honest cell wrote", || {
        std::fs::read_to_string(&file).is_ok_and(|text| text == "honest line\n")
    })
    .await;
}

/// Verifies I20, P11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_report_of_a_cell_changes_no_user_of_another_pod() {
    let kiyot = Fixture::start().await;
    let user = |reference: &str| {
        let answer = kiyot.daemon.cri.reported_image(reference)?;
        cri::ImageStatusResponse::decode(answer).unwrap().image.map(|image| image.username)
    };
    let honest = kiyot.run("honest").await;
    kiyot.create(&honest, "main").await;
    // The kubelet queries the user of an image without a pod, and takes an absent one for root.
    assert_eq!(["busybox", IMAGE].map(user), [Some(String::new()), Some(String::new())]);
    let liar = kiyot.run("liar").await;
    kiyot.provider.nth(1).with(|state| state.user = "nobody".to_owned());
    kiyot.create(&liar, "main").await;
    assert_eq!(["busybox", IMAGE].map(user), [None, None]);
    // Only a report on an image of its own pod counts.
    let mut request = kiyot.container_request(&liar, "other");
    let image = request.config.as_mut().unwrap().image.as_mut().unwrap();
    (image.image, image.user_specified_image) = ("app:1".to_owned(), "app:1".to_owned());
    kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, request).await.unwrap();
    assert_eq!(["app:1", "app:2", "busybox"].map(user), [Some("nobody".to_owned()), None, None]);
    kiyot.stop_sandbox(&liar).await;
    assert_eq!(["busybox", IMAGE].map(user), [Some(String::new()), Some(String::new())]);
}

/// Verifies L8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_response_fails_only_its_call() {
    let kiyot = Fixture::start().await;
    let (honest, liar) = honest_and_liar(&kiyot).await;
    let lying = kiyot.provider.nth(1);
    lying.with(|state| {
        state.endless_responses = vec![
            "ExecSync",
            "StopContainer",
            "ContainerStatus",
            "CreateContainer",
            "Watch",
            "ReadLog",
            "GetFile",
            "ListContainers",
        ]
    });
    for _ in 0..3 {
        let status =
            kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec(&liar)).await.unwrap_err();
        assert!(
            matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted | Code::Internal),
            "{status}"
        );
        is_well(&kiyot, &honest).await;
    }
    let sandbox = sandbox_of(&kiyot, "liar");
    let status = kiyot
        .call::<cri::CreateContainerResponse>(
            Method::CreateContainer,
            kiyot.container_request(&sandbox, "more"),
        )
        .await
        .unwrap_err();
    assert!(
        matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted | Code::Internal),
        "{status}"
    );
    // Its log, its events and its termination message are endless too.
    lying.write("c0", "a line that is never read\n");
    lying.exit("c0", 3);
    lying.with(|state| state.end_watch());
    for method in ["ReadLog", "Watch", "ExecSync", "CreateContainer", "ListContainers"] {
        wait_for(format!("{method} was answered without an end"), || {
            lying.with(|state| state.endless_calls.contains(method))
        })
        .await;
        is_well(&kiyot, &honest).await;
    }
    // Its pod is removed like any other.
    kiyot.stop_sandbox(&sandbox).await;
    is_well(&kiyot, &honest).await;
}

/// Verifies L8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_stay_short_for_any_report_of_a_cell() {
    // Nearly the largest response that is accepted.
    const LONG: usize = 400 << 10;
    let kiyot = Fixture::start().await;
    let (honest, liar) = honest_and_liar(&kiyot).await;
    let lying = kiyot.provider.nth(1);
    let of_liar = sandbox_of(&kiyot, "liar");
    let mut events = kiyot.daemon.cri.events();
    // An image id of the longest response. No container is created from the image, because the
    // lists of containers would soon be too long for a kubelet.
    let image = cri::Image { id: "x".repeat(LONG / 4), ..Default::default() };
    let lie = cri::ImageStatusResponse { image: Some(image), ..Default::default() }.encode_to_vec();
    lying.with(|state| state.fixed_responses.insert("ImageStatus", Ok(lie)));
    let status = kiyot
        .call::<cri::CreateContainerResponse>(
            Method::CreateContainer,
            kiyot.container_request(&of_liar, "more"),
        )
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    lying.with(|state| state.fixed_responses.clear());
    // A container with many groups, and another with a long image reference.
    let user = cri::LinuxContainerUser {
        supplemental_groups: vec![i64::MAX; LONG / 9],
        ..Default::default()
    };
    let user = Some(cri::ContainerUser { linux: Some(user) });
    let told = cri::ContainerStatus { id: "c0".to_owned(), state: 1, user, ..Default::default() };
    let reference = cri::ContainerStatus {
        id: "c1".to_owned(),
        image_ref: "y".repeat(LONG),
        ..Default::default()
    };
    let lie = cri::ContainerStatusResponse { status: Some(reference), ..Default::default() }
        .encode_to_vec();
    lying.with(|state| state.fixed_responses.insert("ContainerStatus", Ok(lie)));
    let more = kiyot.create(&of_liar, "more").await;
    lying.with(|state| state.fixed_responses.clear());
    // A pod with many interfaces.
    let interface = cri::NetworkInterfaceUsage { name: "z".repeat(LONG), ..Default::default() };
    let network = Some(cri::NetworkUsage { interfaces: vec![interface], ..Default::default() });
    let sandbox = Some(cri::PodSandboxStats {
        linux: Some(cri::LinuxPodSandboxStats { network, ..Default::default() }),
        ..Default::default()
    });
    lying.with(|state| {
        state.tell(cell::event::Event::Container(told));
        state
            .tell(cell::event::Event::Heartbeat(cell::Heartbeat { sandbox, ..Default::default() }));
    });
    // Events are applied in order: this is the last.
    lying.exit("c0", 3);
    kiyot.exited(&liar).await;
    for (method, request) in [
        (Method::ListContainers, Vec::new()),
        (Method::ListPodSandboxStats, Vec::new()),
        (
            Method::ContainerStatus,
            cri::ContainerStatusRequest { container_id: liar.clone(), verbose: true }
                .encode_to_vec(),
        ),
        (
            Method::ContainerStatus,
            cri::ContainerStatusRequest { container_id: more, verbose: true }.encode_to_vec(),
        ),
    ] {
        let answer = kiyot.daemon.cri.snapshot(method, &request).unwrap().unwrap();
        assert!(answer.len() < LONG / 8, "{method}: {} bytes", answer.len());
    }
    let stopped = async {
        loop {
            let event =
                cri::ContainerEventResponse::decode(events.next().await.unwrap().unwrap()).unwrap();
            if event.container_id == liar
                && event.container_event_type() == cri::ContainerEventType::ContainerStoppedEvent
            {
                return;
            }
        }
    };
    tokio::time::timeout(crate::kit::LIMIT, stopped).await.unwrap();
    is_well(&kiyot, &honest).await;
}

/// Verifies L11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_message_of_a_cell_is_sanitized() {
    let kiyot = Fixture::start().await;
    let (_, liar) = honest_and_liar(&kiyot).await;
    let mut lie = Status::with_details(
        Code::Unknown,
        "c0: \u{1b}[2J100%\r\n\u{9b}ok\0",
        bytes::Bytes::from_static(b"c0"),
    );
    lie.metadata_mut().insert("x-more", "c0".parse().unwrap());
    kiyot.provider.nth(1).with(|state| state.fixed_responses.insert("ExecSync", Err(lie)));
    let status =
        kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec(&liar)).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message(), status.details()),
        (Code::Unknown, &*format!("{liar}:  [2J100% \n ok "), &b""[..])
    );
    // Its metadata is not passed on.
    assert!(status.metadata().get("x-more").is_none());
}

/// The message is truncated on receipt, and stays within this limit when the cell's shorter id is
/// replaced.
/// Verifies L11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_message_of_a_cell_is_short_also_with_ids_restored() {
    let kiyot = Fixture::start().await;
    let (_, liar) = honest_and_liar(&kiyot).await;
    for message in ["c0".repeat(3_000), "\u{e4}".repeat(2_000), format!("c0 {}", "%".repeat(5_000))]
    {
        let lie = Status::new(Code::Unknown, message);
        kiyot.provider.nth(1).with(|state| state.fixed_responses.insert("ExecSync", Err(lie)));
        let status =
            kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec(&liar)).await.unwrap_err();
        assert_eq!(status.code(), Code::Unknown);
        let length = status.message().len();
        assert!((1_000..=MAX_MESSAGE_BYTES).contains(&length), "{length} bytes: {status}");
    }
}

/// Each call of a container's life is answered without a message, with a message of another type,
/// with invalid bytes, and twice.
/// Verifies L8, Y85.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_of_another_type_or_number_harm_only_their_own_pod() {
    let kiyot = Fixture::start().await;
    let (honest, liar) = honest_and_liar(&kiyot).await;
    let lying = kiyot.provider.nth(1);
    let of_liar = sandbox_of(&kiyot, "liar");
    let other = cell::FromCell {
        message: Some(cell::from_cell::Message::Hello(cell::HelloReply {
            cell: "another".to_owned(),
            build_id: "c0".to_owned(),
            generation: 7,
            ..Default::default()
        })),
    }
    .encode_to_vec();
    let empty = Vec::new();
    let lies = [
        vec![],
        vec![empty.clone()],
        vec![other.clone()],
        vec![vec![0xff; 40]],
        vec![empty.clone(), empty],
        vec![other.clone(), vec![0xff; 3], other],
    ];
    for (n, lie) in lies.iter().enumerate() {
        for method in
            ["Version", "Status", "ImageStatus", "ChangeFiles", "CreateContainer", "ListContainers"]
        {
            lying.with(|state| state.fixed_messages = [(method, lie.clone())].into());
            // The call may fail, but must end.
            let request =
                kiyot.container_request(&of_liar, &format!("{}-{n}", method.to_lowercase()));
            let made = kiyot.call::<cri::CreateContainerResponse>(Method::CreateContainer, request);
            let _ = tokio::time::timeout(LIMIT, made).await.expect(method);
        }
        lying.with(|state| state.fixed_messages = [("ExecSync", lie.clone())].into());
        let _ = kiyot.call::<cri::ExecSyncResponse>(Method::ExecSync, exec(&liar)).await;
        lying.with(|state| state.fixed_messages = [("Exec", lie.clone())].into());
        let request = cri::ExecRequest { container_id: liar.clone(), ..Default::default() };
        kiyot.call::<cri::ExecResponse>(Method::Exec, request).await.unwrap_err();
        lying.with(|state| {
            state.fixed_messages = [("UpdateContainerResources", lie.clone())].into()
        });
        let request = cri::UpdateContainerResourcesRequest {
            container_id: liar.clone(),
            ..Default::default()
        };
        let _ = kiyot
            .call::<cri::UpdateContainerResourcesResponse>(
                Method::UpdateContainerResources,
                request,
            )
            .await;
        lying.with(|state| state.fixed_messages.clear());
        is_well(&kiyot, &honest).await;
    }
    // Events of wrong types, in a wrong order, and twice.
    lying.with(|state| {
        use cell::event::Event;
        let snapshot = cell::Snapshot {
            sandboxes: vec![cri::PodSandboxStatus { id: "5a".to_owned(), ..Default::default() }; 2],
            containers: state
                .containers
                .values()
                .cloned()
                .chain(state.containers.values().cloned())
                .collect(),
            ..Default::default()
        };
        let begun = cri::ContainerStatus { id: "c0".to_owned(), state: 0, ..Default::default() };
        let unknown = cri::ContainerStatus { id: "c0".to_owned(), state: 77, ..Default::default() };
        state.tell(Event::Container(begun));
        state.tell(Event::Container(unknown));
        state.tell(Event::Snapshot(snapshot.clone()));
        state.tell(Event::Snapshot(snapshot));
    });
    lying.exit("c0", 3);
    lying.exit("c0", 4);
    lying.with(|state| {
        let mut runs = state.containers["c0"].clone();
        runs.set_state(cri::ContainerState::ContainerRunning);
        state.tell(cell::event::Event::Container(runs));
        state.tell(cell::event::Event::ContainerGone("c0".to_owned()));
        state.tell(cell::event::Event::ContainerGone("c0".to_owned()));
    });
    assert_eq!(kiyot.exited(&liar).await.exit_code, 3, "the first report counts");
    is_well(&kiyot, &honest).await;
    kiyot.stop_sandbox(&of_liar).await;
    is_well(&kiyot, &honest).await;
}

/// Sends many snapshots full of unrecorded containers. (On a single thread, whose log is captured.)
/// Verifies L17.
#[tokio::test]
async fn log_lines_of_an_endlessly_lying_cell_are_bounded() {
    const SNAPSHOTS: usize = 50;
    let (log, began) = (CapturedLog::start(), Instant::now());
    let kiyot = Fixture::start().await;
    let sandbox = kiyot.run("liar").await;
    let container = kiyot.create(&sandbox, "main").await;
    kiyot.start_container(&container).await;
    let lying = kiyot.provider.only();
    let before = log.lines().len();
    lying.with(|state| {
        let strangers = (0..16)
            .map(|n| cri::ContainerStatus { id: format!("stranger-{n}"), ..Default::default() });
        let containers = state.containers.values().cloned().chain(strangers).collect();
        let sandboxes = vec![cri::PodSandboxStatus { id: "5a".to_owned(), ..Default::default() }];
        let snapshot = cell::Snapshot { sandboxes, containers, ..Default::default() };
        for _ in 0..SNAPSHOTS {
            state.tell(cell::event::Event::Snapshot(snapshot.clone()));
        }
    });
    // Events are applied in order: this is the last.
    lying.exit("c0", 3);
    kiyot.exited(&container).await;
    let lines = log.lines().split_off(before);
    let of_strangers =
        lines.iter().filter(|line| line.contains("container without a record")).count();
    // The limit is for each period.
    let periods = began.elapsed().as_secs().div_ceil(PERIOD.as_secs()) as usize + 1;
    let most = MAX_LINES as usize * periods;
    assert!((1..=most).contains(&of_strangers), "{of_strangers} lines");
    assert!(lines.len() <= 2 * most, "{lines:#?}");
}

/// Verifies L11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_of_a_container_status_are_bounded() {
    let kiyot = Fixture::start().await;
    let (honest, liar) = honest_and_liar(&kiyot).await;
    let mut told = cri::ContainerStatus {
        id: "c0".to_owned(),
        started_at: 100,
        finished_at: 200,
        exit_code: 3,
        reason: "Err\u{1b}]0;or\u{7}".to_owned(),
        message: format!("one\r\u{1b}[2J\u{9b}31m\0\ntwo\t{}", "x".repeat(256 << 10)),
        ..Default::default()
    };
    told.set_state(cri::ContainerState::ContainerExited);
    kiyot.provider.nth(1).with(|state| state.tell(cell::event::Event::Container(told)));
    let status = kiyot.exited(&liar).await;
    assert_eq!(status.reason, "Err ]0;or ");
    assert!(status.message.starts_with("one  [2J 31m \ntwo\txxx"), "{:.40}", status.message);
    assert!(status.message.len() <= 16 << 10, "{} bytes", status.message.len());
    is_well(&kiyot, &honest).await;
}
