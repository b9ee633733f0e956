//! Port forwards of pods in cells, made as by kubectl.

use kiyot_testkit::{
    Container, Kiyot, Kubelet, Node, Pod, RunningPod, cri,
    spdy::{self, Receiver, Sender},
};
use ring::digest::{SHA256, digest};

use crate::cell::{options, remove_and_assert_clean};

/// The length of a large transfer in each direction.
const LARGE_TRANSFER_BYTES: usize = 64 << 20;

async fn open_forward(
    kubelet: &mut Kubelet,
    pod: &RunningPod,
    ports: &[i32],
) -> (Sender, Receiver) {
    let request =
        cri::PortForwardRequest { pod_sandbox_id: pod.sandbox.clone(), port: ports.to_vec() };
    let url = kubelet.runtime.port_forward(request).await.unwrap().into_inner().url;
    spdy::open(&url, "portforward.k8s.io").await.unwrap()
}

/// Opens a connection to a port. Returns its error stream and its data stream.
async fn connect(sender: &mut Sender, port: i32, number: i32) -> (u32, u32) {
    let (port, number) = (port.to_string(), number.to_string());
    let headers = |kind| [("streamtype", kind), ("port", &*port), ("requestid", &*number)];
    let error = sender.begin(&headers("error")).await;
    sender.end(error).await;
    (error, sender.begin(&headers("data")).await)
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest(&SHA256, bytes))
}

/// Returns bytes without repetition.
fn unique_bytes() -> Vec<u8> {
    (0..LARGE_TRANSFER_BYTES as u32 / 4)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect()
}

/// Verifies D38.
#[tokio::test]
async fn concurrent_port_forwards_end_independently() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // Two servers echo. The third server writes a greeting and closes the connection.
    let script = "nc -ll -p 9001 -e cat & nc -ll -p 9002 -e cat & nc -ll -p 9003 -e echo hello & \
                  for port in 9001 9002 9003; do until netstat -ltn | grep -q $port; \
                  do sleep 0.1; done; done; echo ready; wait";
    let spec = Pod::new("ports").in_cell().container(Container::script("main", script));
    let running = kubelet.run_pod(&spec).await.unwrap();
    kubelet.logged(running.container("main"), "ready").await;
    let (mut sender, mut receiver) =
        open_forward(&mut kubelet, &running, &[9001, 9002, 9003]).await;
    let (_, one) = connect(&mut sender, 9001, 0).await;
    let (_, two) = connect(&mut sender, 9002, 1).await;
    let (error, talk) = connect(&mut sender, 9003, 2).await;
    assert_eq!(receiver.read_to_end(talk).await, b"hello\n");
    sender.end(talk).await;
    assert_eq!(receiver.read_to_end(error).await, b"");
    sender.send(two, b"back").await;
    sender.send(one, b"forth").await;
    assert_eq!(receiver.read_until(two, "back").await, "back");
    assert_eq!(receiver.read_until(one, "forth").await, "forth");
    // A forward ends alone, and a new forward to the same port succeeds.
    sender.end(one).await;
    assert_eq!(receiver.read_to_end(one).await, b"forth");
    let (_, again) = connect(&mut sender, 9001, 3).await;
    sender.send(two, b" again").await;
    sender.send(again, b"anew").await;
    assert_eq!(receiver.read_until(two, "again").await, "back again");
    assert_eq!(receiver.read_until(again, "anew").await, "anew");
    drop((sender, receiver));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D38.
#[tokio::test]
async fn large_transfers_in_both_directions_at_once_are_complete() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = "nc -ll -p 9002 -e cat & until netstat -ltn | grep -q 9002; do sleep 0.1; done; \
        echo ready; wait";
    let running = kubelet
        .run_pod(&Pod::new("large").in_cell().container(Container::script("main", script)))
        .await
        .unwrap();
    kubelet.logged(running.container("main"), "ready").await;
    let (mut sender, mut receiver) = open_forward(&mut kubelet, &running, &[9002]).await;
    let (error, echo) = connect(&mut sender, 9002, 0).await;
    let sent = unique_bytes();
    // containerd closes both directions half a second after one direction has ended. Therefore
    // neither direction is ended before all bytes have arrived.
    let (received, ()) =
        tokio::join!(receiver.read_bytes(echo, LARGE_TRANSFER_BYTES), sender.send(echo, &sent));
    sender.end(echo).await;
    assert_eq!(received.len(), LARGE_TRANSFER_BYTES);
    assert_eq!(sha256(&received), sha256(&sent));
    assert_eq!(receiver.read_to_end(error).await, b"");
    drop((sender, receiver));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D38.
#[tokio::test]
async fn port_without_a_listener_fails_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let main = Container::script("main", crate::cell::WAIT);
    let here = kubelet.run_pod(&Pod::new("here").container(main.clone())).await.unwrap();
    let there = kubelet.run_pod(&Pod::new("there").in_cell().container(main)).await.unwrap();
    let mut messages = Vec::new();
    for pod in [&here, &there] {
        let (mut sender, mut receiver) = open_forward(&mut kubelet, pod, &[9999]).await;
        let (error, data) = connect(&mut sender, 9999, 0).await;
        let text = String::from_utf8_lossy(&receiver.read_to_end(error).await)
            .replace(&pod.sandbox, "<id>");
        sender.end(data).await;
        // The text has the id and the network namespace of the sandbox in the cell, because
        // forwarded bytes are not rewritten.
        let of_the_pod = |word: &&str| {
            word.starts_with('/')
                || *word == "host"
                || *word == "<id>"
                || word.trim_end_matches(',').len() == 64
        };
        let plain: Vec<_> = text
            .split([' ', ':', '"'])
            .filter(|word| !of_the_pod(word) && !word.starts_with("<id>"))
            .map(str::to_owned)
            .collect();
        messages.push(plain.join(" "));
    }
    assert!(messages[0].contains("connection refused"), "{messages:?}");
    assert_eq!(messages[1], messages[0]);
    kubelet.stop_and_remove(&here).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &there).await;
}
