//! The daemon as a process: its socket, its signals, its exit codes.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Command, Output, Stdio},
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, LIMIT, Node, Pod, cri, wait_until, websocket::Streams,
};
use tokio::net::UnixStream;

fn options() -> KiyotOptions {
    KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))
}

/// Runs `kiyot serve` to its end.
fn serve(config: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Writes a configuration without cells. Gives its path.
fn configuration(node: &Node, name: &str, socket: &Path) -> std::path::PathBuf {
    let path = node.directory().join(format!("{name}.toml"));
    let text = format!(
        "[server]\nlisten = \"{}\"\n[backends.containerd]\ntype = \"cri\"\nsocket = \"{}\"\n[routing]\ndefault = \"containerd\"\n",
        socket.display(),
        node.socket().display()
    );
    fs::write(&path, text).unwrap();
    path
}

/// Verifies X11.
#[tokio::test]
async fn a_live_socket_is_refused_and_a_stale_one_replaced() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, KiyotOptions { cells: false, ..options() }).await;
    let refused = serve(&configuration(&node, "second", &kiyot.socket()));
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains(&format!(
            "{} is in use: another process listens there",
            kiyot.socket().display()
        )),
        "{said}"
    );
    kiyot.kubelet().await.sandboxes().await.unwrap();

    kiyot.kill9();
    assert!(kiyot.socket().exists(), "it is stale now");
    kiyot.start_again().await;
    kiyot.kubelet().await.sandboxes().await.unwrap();
    assert!(kiyot.stop().await.success());
    assert!(!kiyot.socket().exists());
}

/// Verifies X11.
#[tokio::test]
async fn a_second_daemon_on_the_same_state_is_refused() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let other = node.directory().join("other.toml");
    let text =
        fs::read_to_string(kiyot.configuration()).unwrap().replace("kiyot.sock\"", "other.sock\"");
    fs::write(&other, text).unwrap();
    let refused = serve(&other);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains(
            "is in use by another process: is a second kiyot running with this state_dir?"
        ),
        "{said}"
    );
    kiyot.kubelet().await.sandboxes().await.unwrap();
}

/// Verifies X11.
#[tokio::test]
async fn a_read_only_state_dir_is_said_at_the_start() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, KiyotOptions { cells: false, ..options() }).await;
    let state = node.directory().join("read-only");
    fs::create_dir(&state).unwrap();
    assert!(
        Command::new("mount")
            .args(["-t", "tmpfs", "-o", "ro", "tmpfs"])
            .arg(&state)
            .status()
            .unwrap()
            .success()
    );
    let config = configuration(&node, "read-only", &node.directory().join("other.sock"));
    let milpa = format!(
        "[backends.milpa]\ntype = \"milpa\"\nprovider = \"netns\"\nstate_dir = \"{}\"\n",
        state.display()
    );
    fs::write(&config, fs::read_to_string(&config).unwrap() + &milpa).unwrap();
    let refused = serve(&config);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("read-only file system; state_dir must be writable"), "{said}");
    drop(kiyot);
}

/// Verifies C9, X11, C5.
#[tokio::test]
async fn a_wrong_configuration_is_exit_code_64() {
    let node = Node::start().await;
    let config = configuration(&node, "wrong", &node.directory().join("wrong.sock"));
    fs::write(
        &config,
        fs::read_to_string(&config).unwrap().replace("[routing]\ndefault", "[routing]\ndefualt"),
    )
    .unwrap();
    let refused = serve(&config);
    assert_eq!(refused.status.code(), Some(64));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("defualt") && said.contains("default"), "{said}");
    // What ends it is a line of its log, in whatever form that has.
    let refused = Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--log-format", "json", "--config"])
        .arg(&config)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.trim_end().lines().all(|line| line.starts_with('{') && line.ends_with('}'))
            && said.contains("defualt"),
        "{said}"
    );
}

/// Verifies C9.
#[tokio::test]
async fn what_is_missing_for_cells_is_said_at_the_start_and_pods_of_the_node_run() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(
        &node,
        KiyotOptions { netns: "cell_binary = \"/nonexistent/kiyot-cell\"".to_owned(), ..options() },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let log = kiyot.log();
    let line = log.lines().find(|line| line.contains("No cell can be made as it is now"));
    assert!(line.is_some_and(|line| line.contains("/nonexistent/kiyot-cell")), "{log}");
    let running = kubelet
        .run_pod(&Pod::new("plain").container(Container::script("main", "echo here")))
        .await
        .unwrap();
    // containerd 1.6 now and then says "ttrpc: closed" if a container is stopped just when it ends
    // by itself.
    kubelet.exited(&running.container("main").id).await;
    kubelet.stop_and_remove(&running).await.unwrap();
    let config = kubelet.prepare(&Pod::new("celled").in_cell());
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(refused.message().contains("/nonexistent/kiyot-cell"), "{refused:?}");
}

/// Verifies X11, F14.
#[tokio::test]
async fn a_drain_ends_with_its_timeout_whatever_is_open() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(
        &node,
        KiyotOptions { server: "drain_timeout = \"1s\"".to_owned(), ..options() },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet
        .run_pod(
            &Pod::new("open")
                .in_cell()
                .container(Container::script("main", "while :; do sleep 0.1; done")),
        )
        .await
        .unwrap();
    let main = running.container("main").id.clone();
    // A stream of an exec, a stream of events, and a call that does not end.
    let request = cri::ExecRequest {
        container_id: main.clone(),
        cmd: vec!["cat".to_owned()],
        tty: false,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let exec = Streams::open(&kubelet.runtime.exec(request).await.unwrap().into_inner().url)
        .await
        .unwrap();
    // It is answered with its first event.
    let mut listener = kubelet.clone();
    let events = tokio::spawn(async move {
        listener
            .runtime
            .get_container_events(cri::GetEventsRequest {})
            .await?
            .into_inner()
            .message()
            .await
    });
    let (mut caller, id) = (kubelet.clone(), main.clone());
    let call = tokio::spawn(async move {
        caller.exec_sync(&id, &["sh", "-c", "touch /tmp/began; sleep 1000"]).await
    });
    wait_until("the call goes on", LIMIT, async || {
        let said = kubelet.exec_sync(&main, &["test", "-e", "/tmp/began"]).await.ok()?;
        (said.code == 0).then_some(())
    })
    .await;
    assert!(kiyot.stop().await.success(), "it ends in order");
    assert!(call.await.unwrap().is_err());
    assert!(UnixStream::connect(kiyot.socket()).await.is_err());
    assert!(kiyot.log().contains("calls reset after drain_timeout"));
    assert!(events.await.unwrap().is_err());
    drop(exec);
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    assert_eq!(
        kubelet.container_status(&main).await.unwrap().state(),
        cri::ContainerState::ContainerRunning,
        "pods go on"
    );
    wait_until("the cell is back", LIMIT, async || kubelet.exec_sync(&main, &["true"]).await.ok())
        .await;
    kubelet.stop_and_remove(&running).await.unwrap();
}

/// What a daemon tells systemd, until this is dropped.
struct Told(UnixDatagram);

impl Told {
    fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket)
    }

    /// Waits for a message with a line, and gives all that came until then.
    async fn until(&self, line: &'static str) -> Vec<String> {
        let socket = self.0.try_clone().unwrap();
        let heard = move || {
            let mut all = Vec::new();
            loop {
                let mut message = [0; 4096];
                let length = socket.recv(&mut message).unwrap_or_else(|error| {
                    panic!("{line} is not told: {error}; before came {all:?}")
                });
                let message = String::from_utf8_lossy(&message[..length]).into_owned();
                let is_it = message.lines().any(|told| told == line);
                all.push(message);
                if is_it {
                    return all;
                }
            }
        };
        tokio::task::spawn_blocking(heard).await.unwrap()
    }
}

fn tell(daemon: &std::process::Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(daemon), signal).unwrap();
}

/// Verifies F17, X11, R4.
#[tokio::test]
async fn systemd_is_told_when_it_answers_and_when_it_stops() {
    let node = Node::start().await;
    let (config, notify) = (
        configuration(&node, "notify", &node.directory().join("notify.sock")),
        node.directory().join("notify"),
    );
    let told = Told::new(&notify);
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--config"])
        .arg(&config)
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", "600000")
        .stdin(Stdio::null())
        .stderr(fs::File::create(node.directory().join("notify.log")).unwrap())
        .spawn()
        .unwrap();
    told.until("READY=1").await;
    // It is ready when it says so.
    let mut kubelet = node.kubelet(&node.directory().join("notify.sock")).await.unwrap();
    kubelet.runtime.version(cri::VersionRequest::default()).await.unwrap();
    // It lives, again and again.
    told.until("WATCHDOG=1").await;
    told.until("WATCHDOG=1").await;
    // A reload has a begin and an end, also one that fails.
    let text = fs::read_to_string(&config).unwrap();
    for (content, said) in [
        (Some(format!("{text}rule = 3\n")), "routing.rule = 3"),
        (None, "can't be read"),
        (Some(text), "configuration reloaded"),
    ] {
        match content {
            Some(content) => fs::write(&config, content).unwrap(),
            None => fs::remove_file(&config).unwrap(),
        }
        tell(&daemon, rustix::process::Signal::HUP);
        let heard = told.until("RELOADING=1").await;
        assert!(
            heard.last().is_some_and(|message| message
                .lines()
                .any(|line| line.starts_with("MONOTONIC_USEC="))),
            "{heard:?}"
        );
        told.until("READY=1").await;
        let log = fs::read_to_string(node.directory().join("notify.log")).unwrap();
        assert!(log.contains(said), "{said:?} is not in {log}");
        kubelet.runtime.version(cri::VersionRequest::default()).await.unwrap();
    }
    tell(&daemon, rustix::process::Signal::TERM);
    told.until("STOPPING=1").await;
    drop(kubelet);
    let status = wait_until("it has ended", LIMIT, async || daemon.try_wait().unwrap()).await;
    assert!(status.success());
}

/// Verifies R4.
#[tokio::test]
async fn reloads_that_come_while_one_is_under_way_end_with_the_last_file() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(
        &node,
        KiyotOptions { cells: false, server: "client_timeout = \"100s\"".to_owned(), ..options() },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let text = fs::read_to_string(kiyot.configuration()).unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(kiyot.pid()).unwrap()).unwrap();
    for seconds in 101..=300 {
        // As an editor saves a file: no half of one is ever read.
        let new = kiyot.configuration().with_extension("new");
        fs::write(&new, text.replace("100s", &format!("{seconds}s"))).unwrap();
        fs::rename(&new, kiyot.configuration()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }
    wait_until("the last file is what runs", LIMIT, async || {
        kiyot.log().contains("-> 300s").then_some(())
    })
    .await;
    assert!(!kiyot.log().contains("reload failed"));
    kubelet.sandboxes().await.unwrap();
}

/// Verifies X15.
#[tokio::test]
async fn a_cell_is_in_no_cgroup_of_the_daemon() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = Container::script("main", "trap 'exit 0' TERM; while :; do sleep 0.1; done");
    let running = kubelet.run_pod(&Pod::new("apart").in_cell().container(script)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let groups = |pid: &str| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let daemon = groups(&kiyot.pid().to_string());
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut seen = 0;
    for pid in pids.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if !line.contains(&cell) || pid == kiyot.pid().to_string() {
            continue;
        }
        seen += 1;
        let own = groups(&pid);
        for group in own.lines().filter(|group| !group.is_empty()) {
            assert!(
                group.contains(&format!("/kiyot/{cell}")) || group.contains("kubepods"),
                "{line} is in {group}, the daemon in {daemon}"
            );
        }
    }
    assert!(seen >= 4, "its launcher, its first process, its agent and its containerd are there");
    kubelet.stop_and_remove(&running).await.unwrap();
}
