//! Tests of real cells, launched in network namespaces of their own. They need root, and run in
//! namespaces (scripts/runner).
#![allow(clippy::unwrap_used, reason = "what a test can't set up fails the test, at the place")]

mod files;
mod fixture;
mod image;
mod link;

use std::{
    collections::HashMap,
    process::{Command, Stdio},
    time::Duration,
};

use futures::StreamExt;
use kiyot_proto::{
    cell::{
        Event, FileChange, GetFileRequest, LogGrown, MakeDir, MissingBlobsRequest,
        MountLayersRequest, ReadLogRequest, Root, ShutdownRequest, TrimLogRequest, UnpackedLayer,
        WatchRequest, WriteFile, event::Event as Kind, file_change::Change,
    },
    cri::{
        ContainerConfig, ContainerMetadata, ContainerState, ContainerStatus,
        CreateContainerRequest, ExecSyncRequest, ImageSpec, LinuxPodSandboxConfig,
        LinuxSandboxSecurityContext, Mount, NamespaceMode, NamespaceOption, PodSandboxConfig,
        PodSandboxMetadata, PodSandboxState, RunPodSandboxRequest, StartContainerRequest,
        StopPodSandboxRequest, VersionRequest,
    },
};
use kiyot_testkit::{LIMIT, wait_until, watchdog::Watchdog};
use tonic::{Code, Streaming};

use fixture::{AgentLink, Cell};

/// Upper bound on the wake-ups of an idle containerd in a second.
const MAX_IDLE_WAKE_UPS: u64 = 100;

#[tokio::test]
async fn cell_has_its_own_namespaces_and_ends_with_its_launcher() {
    let _watchdog = Watchdog::start(|| {});
    let mut cell = Cell::launch(3600);
    let init = cell.init().await;
    for kind in ["mnt", "pid", "uts", "ipc", "net"] {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of(&init.to_string()), of("self"), "{kind}");
    }
    let link = AgentLink::new(&cell, init).await;
    let version = link.runtime().version(VersionRequest::default()).await.unwrap().into_inner();
    assert_eq!(version.runtime_name, "containerd");

    let before = rustix::system::uname().nodename().to_owned();
    nsenter(init, &["--uts"], &["hostname", "a-pod"]);
    assert_eq!(nsenter(init, &["--uts"], &["hostname"]).trim(), "a-pod");
    assert_eq!(rustix::system::uname().nodename(), before.as_c_str());
    assert!(
        nsenter(init, &["--net"], &["ip", "-o", "address", "show", "lo"]).contains("127.0.0.1")
    );

    cell.kill_launcher();
    wait_until("init has exited", LIMIT, async || {
        (!std::path::Path::new(&format!("/proc/{init}")).exists()).then_some(())
    })
    .await;
    let left = cell.processes();
    assert!(left.is_empty(), "{left:?}");
}

/// Thousands of idle cells share a node. By default containerd's garbage collector wakes hundreds
/// of times a second if its metadata is in memory.
#[tokio::test]
async fn idle_containerd_rarely_wakes() {
    let _watchdog = Watchdog::start(|| {});
    let cell = Cell::launch(3600);
    let containerd = cell.containerd().await;
    AgentLink::new(&cell, cell.init().await)
        .await
        .runtime()
        .version(VersionRequest::default())
        .await
        .unwrap();
    wait_until("containerd is idle", LIMIT, async || {
        let before = wake_ups(containerd);
        tokio::time::sleep(Duration::from_secs(1)).await;
        (wake_ups(containerd).abs_diff(before) < MAX_IDLE_WAKE_UPS).then_some(())
    })
    .await;
}

/// Returns how often the threads of a process have slept and woken.
fn wake_ups(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("status"));
    threads
        .flatten()
        .filter_map(|thread| status(thread).ok())
        .filter_map(|status| {
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .sum()
}

#[tokio::test]
async fn orphaned_cell_powers_off() {
    let _watchdog = Watchdog::start(|| {});
    let mut cell = Cell::launch(1);
    let code = wait_until("the cell has ended", LIMIT, async || cell.exit_code()).await;
    assert_eq!(code, 0, "{}", cell.console());
    assert!(cell.console().contains("power-off requested service=agent"), "{}", cell.console());
}

#[tokio::test]
async fn failed_launch_writes_its_reason_to_the_console() {
    let _watchdog = Watchdog::start(|| {});
    let mut cell = Cell::launch_in("/nowhere/at/all", 3600);
    let code = wait_until("launch has ended", LIMIT, async || cell.exit_code()).await;
    assert_eq!(code, 1);
    assert!(cell.console().contains("network namespace \"/nowhere/at/all\""), "{}", cell.console());
}

/// Verifies N15.
#[test]
fn launch_without_go_has_no_effect() {
    let dir = tempfile::tempdir().unwrap();
    // Standard input is closed without GO, as when the provider ends.
    let output = Command::new(env!("CARGO_BIN_EXE_kiyot-cell"))
        .args(["launch", "--netns", "/proc/self/ns/net", "--cgroup", "kiyot-none", "--dir"])
        .arg(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cancelled"), "{said}");
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["console.log"]);
    assert!(!std::path::Path::new("/sys/fs/cgroup/unified/kiyot-none").exists());
}

#[tokio::test]
async fn cell_runs_a_pod() {
    let _watchdog = Watchdog::start(|| {});
    let cell = Cell::launch(3600);
    let init = cell.init().await;
    let link = AgentLink::new(&cell, init).await;
    let mut agent = link.agent();
    let mut watch = Watch::begin(&link).await;

    // Push an image.
    let image = image::busybox();
    let digests = image.digests();
    let missing = agent
        .missing_blobs(MissingBlobsRequest { digests: digests.clone() })
        .await
        .unwrap()
        .into_inner()
        .digests;
    assert_eq!(missing, digests);
    for parts in image.parts() {
        agent.put_blob(tokio_stream::iter(parts)).await.unwrap();
    }
    assert!(
        agent
            .missing_blobs(MissingBlobsRequest { digests })
            .await
            .unwrap()
            .into_inner()
            .digests
            .is_empty()
    );
    agent.put_blob(tokio_stream::iter(image.parts().remove(0))).await.unwrap();
    let refused = agent.put_blob(tokio_stream::iter(image::corrupt())).await.unwrap_err();
    assert_ne!(refused.code(), Code::Ok);
    // The directory has other numbers than the request, so containerd unpacks the image.
    let snapshot = image.layer_id();
    let wrong = UnpackedLayer { snapshot, directory: "/etc".into(), ..Default::default() };
    let request = MountLayersRequest { layers: vec![wrong] };
    let refused = agent.mount_layers(request).await.unwrap_err();
    assert!(refused.message().contains("another directory"), "{refused:?}");
    agent.put_image(image.request(&[image::PAUSE, image::BUSYBOX])).await.unwrap();

    // Create a volume.
    let (pod_dir, stop) = (cell.pod_dir(), "volumes/v/stop");
    change(&link, "volumes/v", Change::MakeDir(MakeDir { mode: 0o755, ..Default::default() }))
        .await;
    change(&link, "logs/c", Change::MakeDir(MakeDir { mode: 0o755, ..Default::default() })).await;

    // Run a sandbox and a container, and watch both.
    let config = sandbox_config(&cell);
    let mut runtime = link.runtime();
    let request = RunPodSandboxRequest { config: Some(config.clone()), ..Default::default() };
    let sandbox = runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    watch
        .until("the sandbox is ready", |view| {
            view.sandboxes.get(&sandbox) == Some(&(PodSandboxState::SandboxReady as i32))
        })
        .await;
    let script = "echo begin; while [ ! -e /v/stop ]; do sleep 0.05; done; \
                  echo -n last > /v/message; echo end; exit 3";
    let container = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(ImageSpec { image: image.id(), ..Default::default() }),
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        mounts: vec![Mount {
            container_path: "/v".into(),
            host_path: format!("{pod_dir}/volumes/v"),
            ..Default::default()
        }],
        log_path: "c/0.log".into(),
        ..Default::default()
    };
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container.clone()),
        sandbox_config: Some(config.clone()),
    };
    let id = runtime.create_container(request).await.unwrap().into_inner().container_id;
    watch.until("the container is listed", |view| view.containers.contains_key(&id)).await;
    runtime.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
    watch.until("it runs", |view| view.state(&id) == Some(ContainerState::ContainerRunning)).await;
    watch
        .until("its log grows", |view| view.logs.get("logs/c/0.log").is_some_and(|size| *size > 0))
        .await;

    // The container sees the cell's host name.
    let exec = ExecSyncRequest {
        container_id: id.clone(),
        cmd: ["cat", "/proc/sys/kernel/hostname"].map(str::to_owned).to_vec(),
        timeout: 60,
    };
    nsenter(init, &["--uts"], &["hostname", "a-pod"]);
    assert_eq!(runtime.exec_sync(exec.clone()).await.unwrap().into_inner().stdout, b"a-pod\n");

    // Container, watch and calls survive the death of containerd.
    let killed = cell.containerd().await;
    Command::new("kill").args(["-9", &killed.to_string()]).status().unwrap();
    wait_until("another containerd runs", LIMIT, async || {
        (cell.containerd().await != killed).then_some(())
    })
    .await;
    wait_until("it answers", LIMIT, async || link.runtime().exec_sync(exec.clone()).await.ok())
        .await;

    // The log's size is reported before the exit.
    change(&link, stop, Change::WriteFile(WriteFile { mode: 0o644, ..Default::default() })).await;
    watch
        .until("it has exited", |view| view.state(&id) == Some(ContainerState::ContainerExited))
        .await;
    assert_eq!(watch.view.containers[&id].exit_code, 3);
    let size = std::fs::metadata(format!("{pod_dir}/logs/c/0.log")).unwrap().len();
    assert_eq!(watch.view.logs["logs/c/0.log"], size, "the size is reported before the exit");
    let read = |position| link.agent_read(ReadLogRequest { path: "logs/c/0.log".into(), position });
    let log = String::from_utf8(read(0).await).unwrap();
    let words: Vec<_> = log.lines().map(|line| line.splitn(4, ' ').last().unwrap()).collect();
    assert_eq!(words, ["begin", "end"], "{log}");
    agent.trim_log(TrimLogRequest { path: "logs/c/0.log".into(), position: size }).await.unwrap();
    assert_eq!(read(size - 3).await.len(), 3);
    let message = agent
        .get_file(GetFileRequest {
            root: Root::Pod as i32,
            path: "volumes/v/message".into(),
            limit: 4096,
            last: false,
        })
        .await
        .unwrap();
    assert_eq!(message.into_inner().content, "last");

    let another = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "c".into(), attempt: 1 }),
        command: ["sleep", "1000"].map(str::to_owned).to_vec(),
        log_path: "c/1.log".into(),
        ..container
    };
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(another),
        sandbox_config: Some(config),
    };
    let id = runtime.create_container(request).await.unwrap().into_inner().container_id;
    runtime.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
    agent.shutdown(ShutdownRequest {}).await.unwrap();
    watch
        .until("shutdown has killed the container", |view| {
            view.state(&id) == Some(ContainerState::ContainerExited)
        })
        .await;
    assert_eq!(watch.view.containers[&id].exit_code, 137);
    // The power-off ends the sandbox.
    let ready = PodSandboxState::SandboxReady as i32;
    assert_eq!(watch.view.sandboxes.get(&sandbox), Some(&ready));
    assert!(link.power_off().is_cancelled());

    let request = StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    runtime.stop_pod_sandbox(request).await.unwrap();
    watch
        .until("the sandbox is stopped", |view| {
            view.sandboxes.get(&sandbox) == Some(&(PodSandboxState::SandboxNotready as i32))
        })
        .await;
}

fn sandbox_config(cell: &Cell) -> PodSandboxConfig {
    let namespaces = NamespaceOption {
        network: NamespaceMode::Node as i32,
        pid: NamespaceMode::Container as i32,
        ..Default::default()
    };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "pod".into(),
            uid: "uid".into(),
            namespace: "ns".into(),
            attempt: 0,
        }),
        log_directory: format!("{}/logs", cell.pod_dir()),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("/{}/pod", cell.cgroup()),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

async fn change(link: &AgentLink, path: &str, change: Change) {
    let change = FileChange { root: Root::Pod as i32, path: path.into(), change: Some(change) };
    link.agent().change_files(tokio_stream::iter([change])).await.unwrap();
}

fn nsenter(pid: u32, kinds: &[&str], command: &[&str]) -> String {
    let output = Command::new("nsenter")
        .args(["--target", &pid.to_string()])
        .args(kinds)
        .args(command)
        .output()
        .unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// State of a watcher.
#[derive(Debug, Default)]
struct View {
    sandboxes: HashMap<String, i32>,
    containers: HashMap<String, ContainerStatus>,
    logs: HashMap<String, u64>,
}

impl View {
    fn state(&self, id: &str) -> Option<ContainerState> {
        self.containers.get(id).map(ContainerStatus::state)
    }

    fn apply(&mut self, event: Event) {
        match event.event.unwrap() {
            Kind::Snapshot(snapshot) => {
                *self = Self::default();
                snapshot
                    .sandboxes
                    .into_iter()
                    .for_each(|status| self.apply(Event { event: Some(Kind::Sandbox(status)) }));
                snapshot
                    .containers
                    .into_iter()
                    .for_each(|status| self.apply(Event { event: Some(Kind::Container(status)) }));
                snapshot
                    .logs
                    .into_iter()
                    .for_each(|log| self.apply(Event { event: Some(Kind::Log(log)) }));
            }
            Kind::Sandbox(status) => drop(self.sandboxes.insert(status.id, status.state)),
            Kind::Container(status) => drop(self.containers.insert(status.id.clone(), status)),
            Kind::ContainerGone(id) => drop(self.containers.remove(&id)),
            Kind::SandboxGone(id) => drop(self.sandboxes.remove(&id)),
            Kind::Log(LogGrown { path, size }) => drop(self.logs.insert(path, size)),
            Kind::Heartbeat(_) => {}
        }
    }
}

struct Watch {
    events: Streaming<Event>,
    view: View,
}

impl Watch {
    async fn begin(link: &AgentLink) -> Self {
        let mut events = link.agent().watch(WatchRequest {}).await.unwrap().into_inner();
        let mut view = View::default();
        let first = events.next().await.unwrap().unwrap();
        assert!(matches!(first.event, Some(Kind::Snapshot(_))), "{first:?}");
        view.apply(first);
        Self { events, view }
    }

    async fn until(&mut self, what: &str, holds: impl Fn(&View) -> bool) {
        let wait = async {
            while !holds(&self.view) {
                let event = self.events.next().await.unwrap().unwrap();
                self.view.apply(event);
            }
        };
        let waited: Result<(), _> =
            tokio::time::timeout(LIMIT.max(Duration::from_secs(60)), wait).await;
        assert!(waited.is_ok(), "timeout before {what}: {:?}", self.view);
    }
}
