//! The daemon as a process: socket, signals and exit codes.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Command, Output, Stdio},
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, LIMIT, Node, Pod, Provider, cri, wait_until, websocket::Streams,
};
use tokio::net::UnixStream;

fn options() -> KiyotOptions {
    KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))
}

/// Runs `kiyot serve` until it exits.
fn serve(config: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Writes a configuration without cells. Returns its path.
fn configuration(node: &Node, name: &str, socket: &Path) -> std::path::PathBuf {
    let path = node.directory().join(format!("{name}.toml"));
    let text = format!(
        "[server]\nlisten = \"{}\"\n[backends.containerd]\ntype = \"cri\"\nsocket = \"{}\"\n\
         [routing]\ndefault = \"containerd\"\n",
        socket.display(),
        node.socket().display()
    );
    fs::write(&path, text).unwrap();
    path
}

/// Verifies X11.
#[tokio::test]
async fn live_socket_is_refused_and_stale_socket_replaced() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, KiyotOptions { cells: false, ..options() }).await;
    let refused = serve(&configuration(&node, "second", &kiyot.socket()));
    assert_eq!(refused.status.code(), Some(1));
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        output.contains(&format!(
            "{} is in use: another process listens there",
            kiyot.socket().display()
        )),
        "{output}"
    );
    kiyot.kubelet().await.sandboxes().await.unwrap();

    kiyot.kill9();
    assert!(kiyot.socket().exists(), "the socket is stale");
    kiyot.start_again().await;
    kiyot.kubelet().await.sandboxes().await.unwrap();
    assert!(kiyot.stop().await.success());
    assert!(!kiyot.socket().exists());
}

/// Verifies X11.
#[tokio::test]
async fn second_daemon_on_the_same_state_is_refused() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let other = node.directory().join("other.toml");
    let text =
        fs::read_to_string(kiyot.configuration()).unwrap().replace("kiyot.sock\"", "other.sock\"");
    fs::write(&other, text).unwrap();
    let refused = serve(&other);
    assert_eq!(refused.status.code(), Some(1));
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        output.contains(
            "is in use by another process: is a second kiyot running with this state_dir?"
        ),
        "{output}"
    );
    kiyot.kubelet().await.sandboxes().await.unwrap();
}

/// Verifies X11.
#[tokio::test]
async fn read_only_state_dir_is_refused_at_start() {
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
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(output.contains("read-only file system; state_dir must be writable"), "{output}");
    drop(kiyot);
}

/// Verifies C9, X11, C5.
#[tokio::test]
async fn invalid_configuration_exits_with_64() {
    let node = Node::start().await;
    let config = configuration(&node, "wrong", &node.directory().join("wrong.sock"));
    fs::write(
        &config,
        fs::read_to_string(&config).unwrap().replace("[routing]\ndefault", "[routing]\ndefualt"),
    )
    .unwrap();
    let refused = serve(&config);
    assert_eq!(refused.status.code(), Some(64));
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(output.contains("defualt") && output.contains("default"), "{output}");
    // The error is a line of the log, in the format of the log.
    let refused = Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--log-format", "json", "--config"])
        .arg(&config)
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    let lines: Vec<serde_json::Value> =
        output.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line["level"].is_string()), "{output}");
    assert!(output.contains("defualt"), "{output}");
}

/// Verifies C9.
#[tokio::test]
async fn missing_cell_binary_is_logged_at_start_and_pods_of_the_node_run() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(
        &node,
        KiyotOptions {
            of_provider: "cell_binary = \"/nonexistent/kiyot-cell\"".to_owned(),
            ..options()
        },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let log = kiyot.log();
    let line = log.lines().find(|line| line.contains("provider can't make cells"));
    assert!(line.is_some_and(|line| line.contains("/nonexistent/kiyot-cell")), "{log}");
    let running = kubelet
        .run_pod(&Pod::new("plain").container(Container::script("main", "echo here")))
        .await
        .unwrap();
    // containerd 1.6 may fail with "ttrpc: closed" if a container is stopped while it ends.
    kubelet.exited(&running.container("main").id).await;
    kubelet.stop_and_remove(&running).await.unwrap();
    let config = kubelet.prepare(&Pod::new("celled").in_cell());
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(refused.message().contains("/nonexistent/kiyot-cell"), "{refused:?}");
}

/// Verifies X11, F14.
#[tokio::test]
async fn drain_cuts_open_calls_and_streams_at_its_timeout() {
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
    // The daemon has an exec stream, an event stream, and a call that does not end.
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
    // The response begins with the first event.
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
    wait_until("the call is running", LIMIT, async || {
        let output = kubelet.exec_sync(&main, &["test", "-e", "/tmp/began"]).await.ok()?;
        (output.code == 0).then_some(())
    })
    .await;
    assert!(kiyot.stop().await.success(), "the daemon exits with 0");
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
        "the container keeps running"
    );
    wait_until("the cell is connected again", LIMIT, async || {
        kubelet.exec_sync(&main, &["true"]).await.ok()
    })
    .await;
    kubelet.stop_and_remove(&running).await.unwrap();
}

/// The notify socket of systemd.
struct NotifySocket(UnixDatagram);

impl NotifySocket {
    fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket)
    }

    /// Waits for a message with a line. Returns all messages up to this one.
    async fn until(&self, line: &'static str) -> Vec<String> {
        let socket = self.0.try_clone().unwrap();
        let receive = move || {
            let mut all = Vec::new();
            loop {
                let mut message = [0; 4096];
                let length = socket.recv(&mut message).unwrap_or_else(|error| {
                    panic!("{line} was not sent: {error}; messages before: {all:?}")
                });
                let message = String::from_utf8_lossy(&message[..length]).into_owned();
                let is_last = message.lines().any(|sent| sent == line);
                all.push(message);
                if is_last {
                    return all;
                }
            }
        };
        tokio::task::spawn_blocking(receive).await.unwrap()
    }
}

fn signal(daemon: &std::process::Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(daemon), signal).unwrap();
}

/// Verifies F17, X11, R4.
#[tokio::test]
async fn systemd_is_notified_of_ready_watchdog_reload_and_stop() {
    let node = Node::start().await;
    let (config, notify) = (
        configuration(&node, "notify", &node.directory().join("notify.sock")),
        node.directory().join("notify"),
    );
    let systemd = NotifySocket::new(&notify);
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--config"])
        .arg(&config)
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", "600000")
        .stdin(Stdio::null())
        .stderr(fs::File::create(node.directory().join("notify.log")).unwrap())
        .spawn()
        .unwrap();
    systemd.until("READY=1").await;
    // After READY=1, the daemon answers.
    let mut kubelet = node.kubelet(&node.directory().join("notify.sock")).await.unwrap();
    kubelet.runtime.version(cri::VersionRequest::default()).await.unwrap();
    // The watchdog is notified repeatedly.
    systemd.until("WATCHDOG=1").await;
    systemd.until("WATCHDOG=1").await;
    // The begin and the end of a failed reload are notified too.
    let text = fs::read_to_string(&config).unwrap();
    for (content, expected) in [
        (Some(format!("{text}rule = 3\n")), "routing.rule = 3"),
        (None, "can't be read"),
        (Some(text), "configuration reloaded"),
    ] {
        match content {
            Some(content) => fs::write(&config, content).unwrap(),
            None => fs::remove_file(&config).unwrap(),
        }
        signal(&daemon, rustix::process::Signal::HUP);
        let messages = systemd.until("RELOADING=1").await;
        assert!(
            messages.last().is_some_and(|message| message
                .lines()
                .any(|line| line.starts_with("MONOTONIC_USEC="))),
            "{messages:?}"
        );
        systemd.until("READY=1").await;
        let log = fs::read_to_string(node.directory().join("notify.log")).unwrap();
        assert!(log.contains(expected), "{expected:?} is not in {log}");
        kubelet.runtime.version(cri::VersionRequest::default()).await.unwrap();
    }
    signal(&daemon, rustix::process::Signal::TERM);
    let messages = systemd.until("STOPPING=1").await;
    // The requested time is `drain_timeout` and 30 s.
    assert!(
        messages.last().is_some_and(|message| message
            .lines()
            .any(|line| line == "EXTEND_TIMEOUT_USEC=40000000")),
        "{messages:?}"
    );
    drop(kubelet);
    let status =
        wait_until("the daemon has ended", LIMIT, async || daemon.try_wait().unwrap()).await;
    assert!(status.success());
}

/// Verifies R4.
#[tokio::test]
async fn concurrent_reloads_end_with_the_last_file() {
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
        // The rename replaces the file at once, so that no partial file is read.
        let new = kiyot.configuration().with_extension("new");
        fs::write(&new, text.replace("100s", &format!("{seconds}s"))).unwrap();
        fs::rename(&new, kiyot.configuration()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }
    wait_until("the last file is in use", LIMIT, async || {
        kiyot.log().contains("-> 300s").then_some(())
    })
    .await;
    assert!(!kiyot.log().contains("reload failed"));
    kubelet.sandboxes().await.unwrap();
}

/// Verifies C9.
#[tokio::test]
async fn reload_checks_the_limit_of_inotify_instances() {
    // 128 instances, and four more for each cell.
    const NEEDED: usize = 128 + 4 * 10_000;
    let node = Node::start().await;
    let options =
        KiyotOptions { provider: Provider::Netns, milpa: "max_cells = 1".to_owned(), ..options() };
    let kiyot = Kiyot::start(&node, options).await;
    let is_logged = || kiyot.log().contains(&format!("too low for max_cells; needed: {NEEDED}"));
    assert!(!is_logged());
    kiyot.reload("max_cells = 1", "max_cells = 10000").await;
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    assert_eq!(is_logged(), limit < NEEDED, "{limit}: {}", kiyot.log());
}

/// Verifies X15.
#[tokio::test]
async fn cell_is_outside_of_the_cgroup_of_the_daemon() {
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
    assert!(seen >= 4, "launcher, init, agent and containerd of the cell");
    kubelet.stop_and_remove(&running).await.unwrap();
}
