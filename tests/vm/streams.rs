//! Streams of exec and attach with an input.

use kiyot_testkit::{Container, Kubelet, RunningPod, cri, spdy, websocket::Streams};

/// Bytes of an input that takes many segments.
const INPUT_BYTES: usize = 1 << 20;

/// Returns a container that reads a line of its input, and repeats it until SIGTERM.
pub(crate) fn reader() -> Container {
    let script = "trap 'exit 0' TERM; read line; while :; do echo got $line; sleep 0.5; done";
    Container { stdin: true, ..Container::script("reader", script) }
}

/// Executes a shell script by SPDY, with an input that ends. Returns its outputs and its status.
async fn exec(kubelet: &mut Kubelet, container: &str, script: &str, input: &[u8]) -> [String; 3] {
    let request = cri::ExecRequest {
        container_id: container.to_owned(),
        cmd: ["sh", "-c", script].map(str::to_owned).into(),
        tty: false,
        stdin: true,
        stdout: true,
        stderr: true,
    };
    let url = kubelet.runtime.exec(request).await.unwrap().into_inner().url;
    let (mut sender, mut receiver) = spdy::open(&url, "v4.channel.k8s.io").await.unwrap();
    let mut streams = Vec::new();
    for kind in ["error", "stdin", "stdout", "stderr"] {
        streams.push(sender.begin(&[("streamtype", kind)]).await);
    }
    sender.send(streams[1], input).await;
    sender.end(streams[1]).await;
    let mut read =
        async |stream: u32| String::from_utf8(receiver.read_to_end(stream).await).unwrap();
    [read(streams[2]).await, read(streams[3]).await, read(streams[0]).await]
}

/// Attaches to the [`reader`] of a pod by WebSocket, and has it read a line.
async fn attach(kubelet: &mut Kubelet, pod: &RunningPod) {
    let request = cri::AttachRequest {
        container_id: pod.container("reader").id.clone(),
        stdin: true,
        tty: false,
        stdout: true,
        stderr: true,
    };
    let url = kubelet.runtime.attach(request).await.unwrap().into_inner().url;
    let mut streams = Streams::open(&url).await.unwrap();
    streams.send(0, b"a line\n").await;
    let output = streams.read_until(1, "got a line").await;
    assert!(output.contains("got a line"), "{output}");
}

/// Asserts that the input of exec and attach reaches the containers `main` and `reader` of a pod,
/// and that their output and exit code return.
pub(crate) async fn carry_input(kubelet: &mut Kubelet, pod: &RunningPod) {
    let main = &pod.container("main").id;
    let script = "cat; echo over; echo bad >&2; exit 7";
    let [stdout, stderr, status] = exec(kubelet, main, script, b"some input ").await;
    assert_eq!((stdout.as_str(), stderr.as_str()), ("some input over\n", "bad\n"));
    assert!(status.contains("\"7\""), "{status}");
    let input: Vec<u8> = (0..INPUT_BYTES).map(|index| b'a' + (index % 23) as u8).collect();
    let [stdout, stderr, status] = exec(kubelet, main, "cat", &input).await;
    assert!(stdout.as_bytes() == input, "{} bytes of {INPUT_BYTES}", stdout.len());
    assert!(stderr.is_empty() && status.contains("Success"), "{stderr}{status}");
    attach(kubelet, pod).await;
}
