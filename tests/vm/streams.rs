//! Streams of exec and attach with an input.

use kiyot_testkit::{Container, Kubelet, RunningPod, cri, spdy, websocket::Streams};

/// Bytes of an input that takes many segments.
const INPUT_BYTES: usize = 1 << 20;

/// Returns a container that reads a line of its input, and repeats it until SIGTERM.
pub(crate) fn reader() -> Container {
    let script = "trap 'exit 0' TERM; read line; while :; do echo got $line; sleep 0.5; done";
    Container { stdin: true, ..Container::script("reader", script) }
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
    let output = spdy::exec(kubelet, main, &["sh", "-c", script], b"some input ").await;
    assert_eq!((&*output.stdout, &*output.stderr), ("some input over\n", "bad\n"));
    assert!(output.status.contains("\"7\""), "{}", output.status);
    let input: Vec<u8> = (0..INPUT_BYTES).map(|index| b'a' + (index % 23) as u8).collect();
    let spdy::ExecOutput { stdout, stderr, status } =
        spdy::exec(kubelet, main, &["cat"], &input).await;
    assert!(stdout.as_bytes() == input, "{} bytes of {INPUT_BYTES}", stdout.len());
    assert!(stderr.is_empty() && status.contains("Success"), "{stderr}{status}");
    attach(kubelet, pod).await;
}
