//! Exec, attach and port-forward of pods in cells, by WebSocket clients.

use std::time::Duration;

use kiyot_testkit::{Container, Kiyot, Kubelet, Node, Pod, cri, wait_until, websocket::Streams};

use crate::cell::{WAIT, lifecycle::endings::Ending, options, pod, remove_and_assert_clean};

/// The maximal number of concurrent streams of a cell (docs/limits.md).
const MAX_STREAMS: usize = 96;
/// The maximal time until the streams of disconnected clients have ended.
const ABANDONED_LIMIT: Duration = Duration::from_secs(60);

async fn exec(kubelet: &mut Kubelet, container: &str, command: &[&str], tty: bool) -> String {
    let cmd = command.iter().map(|word| (*word).to_owned()).collect();
    let request = cri::ExecRequest {
        container_id: container.to_owned(),
        cmd,
        tty,
        stdin: true,
        stdout: true,
        stderr: !tty,
    };
    kubelet.runtime.exec(request).await.unwrap().into_inner().url
}

/// Verifies D5.
#[tokio::test]
async fn exec_carries_input_output_and_the_exit_code() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("shell", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();

    let url = exec(
        &mut kubelet,
        &main,
        &["sh", "-c", "read word; echo got $word; echo oops >&2; exit 3"],
        false,
    )
    .await;
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    let mut streams = Streams::open(&url).await.unwrap();
    streams.send(0, b"sesame\n").await;
    streams.read_to_end().await;
    assert_eq!(streams.text(1), "got sesame\n");
    assert_eq!(streams.text(2), "oops\n");
    assert!(streams.text(3).contains("\"3\""), "{}", streams.text(3));
    assert!(Streams::open(&url).await.is_err(), "a URL can be used only once");

    let url = exec(&mut kubelet, &main, &["sh"], true).await;
    let mut streams = Streams::open(&url).await.unwrap();
    streams.send(4, br#"{"Width":123,"Height":45}"#).await;
    streams
        .send(
            0,
            b"until [ \"$(stty size)\" = '45 123' ]; do sleep 0.1; done; echo re''sized; exit\n",
        )
        .await;
    let output = streams.read_until(1, "resized").await;
    assert!(output.contains("resized"), "{output}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D5.
#[tokio::test]
async fn commands_of_disconnected_clients_leave_room_for_others() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("followed", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();

    let mut open = Vec::new();
    for _ in 0..MAX_STREAMS {
        let url = exec(&mut kubelet, &main, &["sleep", "1000"], false).await;
        open.push(Streams::open(&url).await.unwrap());
    }
    let url = exec(&mut kubelet, &main, &["echo", "done"], false).await;
    let refused = Streams::open(&url).await.unwrap_err();
    assert!(refused.to_string().contains("503"), "{refused}");

    drop(open);
    let mut streams = wait_until("another command has room", ABANDONED_LIMIT, async || {
        let url = exec(&mut kubelet, &main, &["echo", "done"], false).await;
        Streams::open(&url).await.ok()
    })
    .await;
    streams.read_to_end().await;
    assert_eq!(streams.text(1), "done\n");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D5.
#[tokio::test]
async fn attach_shows_what_a_container_writes() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running =
        kubelet.run_pod(&pod("watched", "while :; do echo tick; sleep 0.1; done")).await.unwrap();
    let container_id = running.container("main").id.clone();
    let request =
        cri::AttachRequest { container_id, stdin: false, tty: false, stdout: true, stderr: true };
    let url = kubelet.runtime.attach(request).await.unwrap().into_inner().url;
    let mut streams = Streams::open(&url).await.unwrap();
    assert!(streams.read_until(1, "tick").await.contains("tick"));
    drop(streams);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D42.
#[tokio::test]
async fn attach_to_a_terminal_passes_its_input_and_its_size() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // containerd sets the terminal size before it passes output to the attached client. Once output
    // has arrived, a size is set as well.
    let ending = Ending::new();
    let script = format!(
        "until [ -e /tmp/attached ]; do echo here; sleep 0.1; done; \
         until [ \"$(stty size)\" = '45 123' ]; do sleep 0.1; done; echo re''sized; read word; \
         echo got $word; {}; exit 4",
        ending.script()
    );
    let mut main = Container::script("main", &script);
    (main.tty, main.stdin) = (true, true);
    let running = kubelet.run_pod(&Pod::new("terminal").in_cell().container(main)).await.unwrap();
    let main = running.container("main").clone();
    let request = cri::AttachRequest {
        container_id: main.id.clone(),
        stdin: true,
        tty: true,
        stdout: true,
        stderr: false,
    };
    let url = kubelet.runtime.attach(request).await.unwrap().into_inner().url;
    let mut streams = Streams::open(&url).await.unwrap();
    assert!(streams.read_until(1, "here").await.contains("here"));
    assert_eq!(kubelet.exec_sync(&main.id, &["touch", "/tmp/attached"]).await.unwrap().code, 0);
    streams.send(4, br#"{"Width":123,"Height":45}"#).await;
    let output = streams.read_until(1, "resized").await;
    assert!(output.contains("resized"), "{output}");
    streams.send(0, b"sesame\n").await;
    let output = streams.read_until(1, "got sesame").await;
    assert!(output.contains("got sesame"), "{output}");
    kubelet.logged(&main, "got sesame").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 4);
    drop(streams);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D5.
#[tokio::test]
async fn port_is_forwarded_into_the_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // `httpd` forks into the background when it listens.
    let script = format!(
        "mkdir -p /www; echo forwarded > /www/index.html; httpd -p 127.0.0.1:8080 -h /www; \
        echo ready; {WAIT}"
    );
    let server = Container::script("main", &script);
    let running = kubelet.run_pod(&Pod::new("served").in_cell().container(server)).await.unwrap();
    kubelet.logged(running.container("main"), "ready").await;
    let request =
        cri::PortForwardRequest { pod_sandbox_id: running.sandbox.clone(), port: vec![8080] };
    let url = kubelet.runtime.port_forward(request).await.unwrap().into_inner().url;
    let mut streams = Streams::open(&url).await.unwrap();
    streams.send(0, b"GET / HTTP/1.0\r\n\r\n").await;
    let page = streams.read_until(0, "forwarded").await;
    assert!(page.contains("200 OK") && page.contains("forwarded"), "{page}");
    drop(streams);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
