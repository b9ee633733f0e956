//! Latency and throughput of exec and port-forward. On the node they use containerd's own streaming
//! server, whose URL passes through kiyot; in a cell they use a tunnel.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, RunningPod, cri, websocket::Streams,
};

use super::calls::quantile;

/// Bytes of a write to standard input, as kubectl writes.
const CHUNK_BYTES: usize = 32 << 10;
/// Small page of the pod's HTTP server.
const SMALL_PAGE: &str = "/small";
/// Large page of the pod's HTTP server.
const LARGE_PAGE: &str = "/large";

/// Measurements of a pod: times, and rates in MB/s.
#[derive(Debug, Default)]
struct Times {
    exec_first: Vec<Duration>,
    exec_sync: Vec<Duration>,
    forward_first: Vec<Duration>,
    output: Vec<f64>,
    input: Vec<f64>,
    forwarded: Vec<f64>,
}

/// Measures a pod on the node and a pod in a cell alternately, and prints a table.
pub(crate) async fn measure(node: &Node, program: &Path, rounds: usize, mib: usize) {
    let options = KiyotOptions { log: "warn".to_owned(), ..KiyotOptions::new(program) };
    let kiyot = Kiyot::start(node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let bytes = mib << 20;
    let script = format!(
        "mkdir /www; echo x > /www{SMALL_PAGE}; head -c {bytes} /dev/zero > /www{LARGE_PAGE}; \
         echo ready; exec httpd -f -p 127.0.0.1:8080 -h /www"
    );
    let mut pods = Vec::new();
    for in_cell in [false, true] {
        let pod = Pod::new("served").container(Container::script("main", &script));
        let running =
            kubelet.run_pod(&if in_cell { pod.in_cell() } else { pod }).await.expect("a pod runs");
        kubelet.logged(running.container("main"), "ready").await;
        pods.push((running, Times::default()));
    }
    for _ in 0..rounds {
        for (pod, times) in &mut pods {
            // Short operations are repeated.
            for _ in 0..10 {
                times.exec_sync.push(exec_sync(&mut kubelet, pod).await);
                times.exec_first.push(exec_first(&mut kubelet, pod).await);
                times.forward_first.push(forward(&mut kubelet, pod, SMALL_PAGE, 1).await);
            }
            times.output.push(rate(bytes, output(&mut kubelet, pod, bytes).await));
            times.input.push(rate(bytes, input(&mut kubelet, pod, bytes).await));
            times.forwarded.push(rate(bytes, forward(&mut kubelet, pod, LARGE_PAGE, bytes).await));
        }
    }
    println!("\n| what | on the node | in a cell |");
    println!("| --- | --- | --- |");
    row(&mut pods, "ExecSync of `true`, p50 ms", |times| milliseconds(&mut times.exec_sync));
    row(&mut pods, "Exec: its first byte, p50 ms", |times| milliseconds(&mut times.exec_first));
    row(&mut pods, "PortForward: its first byte, p50 ms", |times| {
        milliseconds(&mut times.forward_first)
    });
    row(&mut pods, "Exec: standard output, MB/s p50", |times| median(&mut times.output));
    row(&mut pods, "Exec: standard input, MB/s p50", |times| median(&mut times.input));
    row(&mut pods, "PortForward: from the pod, MB/s p50", |times| median(&mut times.forwarded));
    for (pod, _) in &pods {
        kubelet.stop_and_remove(pod).await.expect("a pod ends");
    }
}

fn row(pods: &mut [(RunningPod, Times)], name: &str, value: impl Fn(&mut Times) -> String) {
    let values: Vec<_> = pods.iter_mut().map(|(_, times)| value(times)).collect();
    println!("| {name} | {} |", values.join(" | "));
}

fn milliseconds(times: &mut [Duration]) -> String {
    times.sort_unstable();
    format!("{:.1}", quantile(times, 0.5) / 1e3)
}

fn median(rates: &mut [f64]) -> String {
    rates.sort_by(f64::total_cmp);
    format!("{:.0}", rates[rates.len() / 2])
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}

async fn exec_sync(kubelet: &mut Kubelet, pod: &RunningPod) -> Duration {
    let begun = Instant::now();
    kubelet.exec_sync(&pod.container("main").id, &["true"]).await.expect("a program runs");
    begun.elapsed()
}

async fn exec(kubelet: &mut Kubelet, pod: &RunningPod, script: &str, stdin: bool) -> Streams {
    let cmd = ["sh", "-c", script].map(str::to_owned).to_vec();
    let request = cri::ExecRequest {
        container_id: pod.container("main").id.clone(),
        cmd,
        tty: false,
        stdin,
        stdout: true,
        stderr: true,
    };
    let url = kubelet.runtime.exec(request).await.expect("a program can be run").into_inner().url;
    Streams::open(&url).await.expect("its streams open")
}

async fn exec_first(kubelet: &mut Kubelet, pod: &RunningPod) -> Duration {
    let begun = Instant::now();
    let mut streams = exec(kubelet, pod, "echo x; read word", true).await;
    streams.read_until(1, "x").await;
    begun.elapsed()
}

async fn output(kubelet: &mut Kubelet, pod: &RunningPod, bytes: usize) -> Duration {
    let begun = Instant::now();
    let mut streams = exec(kubelet, pod, &format!("head -c {bytes} /dev/zero"), false).await;
    streams.read_bytes(1, bytes).await;
    begun.elapsed()
}

async fn input(kubelet: &mut Kubelet, pod: &RunningPod, bytes: usize) -> Duration {
    let begun = Instant::now();
    let mut streams =
        exec(kubelet, pod, &format!("head -c {bytes} > /dev/null; echo done"), true).await;
    let chunk = vec![0; CHUNK_BYTES];
    for _ in 0..bytes / CHUNK_BYTES {
        streams.send(0, &chunk).await;
    }
    streams.read_until(1, "done").await;
    begun.elapsed()
}

/// Forwards a port of a pod and opens its streams.
pub(crate) async fn forwarded_port(kubelet: &mut Kubelet, pod: &RunningPod) -> Streams {
    let request = cri::PortForwardRequest { pod_sandbox_id: pod.sandbox.clone(), port: vec![8080] };
    let url = kubelet
        .runtime
        .port_forward(request)
        .await
        .expect("a port can be forwarded")
        .into_inner()
        .url;
    Streams::open(&url).await.expect("its streams open")
}

/// Requests a page through a forwarded port, and reads this many bytes.
async fn forward(kubelet: &mut Kubelet, pod: &RunningPod, page: &str, bytes: usize) -> Duration {
    let begun = Instant::now();
    let mut streams = forwarded_port(kubelet, pod).await;
    streams.send(0, format!("GET {page} HTTP/1.0\r\n\r\n").as_bytes()).await;
    streams.read_bytes(0, bytes).await;
    begun.elapsed()
}
