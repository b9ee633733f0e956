//! The page of metrics and the health checks.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use kiyot::metrics;
use kiyot_testkit::{Container, Kiyot, KiyotOptions, LIMIT, Node, Pod, wait_until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
};

/// A daemon that is killed at the end of the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a request. Returns the head and the body of the response.
async fn request(address: SocketAddr, line: &str) -> (String, String) {
    let request = format!("{line} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    };
    let response = tokio::time::timeout(LIMIT, exchange).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// Waits until a daemon has logged the address of its page.
async fn address(log: impl Fn() -> String) -> SocketAddr {
    wait_until("metrics are served", LIMIT, async || {
        let log = log();
        let line = log.lines().find(|line| line.contains("metrics served"))?;
        line.split_once("address=")?.1.split_whitespace().next()?.parse().ok()
    })
    .await
}

/// Returns the samples of a page by name and labels. Checks the names and labels.
fn samples(page: &str) -> BTreeMap<String, f64> {
    let known: BTreeMap<_, _> = metrics::ALL.iter().flat_map(|metric| metric.samples()).collect();
    let mut samples = BTreeMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (sample, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = sample.split_once('{').unwrap_or((sample, "}"));
        let mut names: Vec<_> = labels
            .trim_end_matches('}')
            .split("\",")
            .filter_map(|label| label.split_once('=').map(|(name, _)| name))
            .collect();
        names.sort_unstable();
        let mut expected = known.get(name).unwrap_or_else(|| panic!("{name} is not known")).clone();
        expected.sort_unstable();
        assert_eq!(names, expected, "{line}");
        assert!(samples.insert(sample.to_owned(), value.parse().unwrap()).is_none(), "{line}");
    }
    samples
}

fn daemon_without_runtime(directory: &Path, listen: SocketAddr) -> (Daemon, impl Fn() -> String) {
    let (config, log) = (directory.join("other.toml"), directory.join("other.log"));
    let at = directory.display();
    let text = format!(
        "[server]\nlisten = \"{at}/other.sock\"\n[metrics]\nlisten = \"{listen}\"\n\
         [backends.containerd]\ntype = \"cri\"\nsocket = \"{at}/absent.sock\"\n\
         connect_timeout = \"100ms\"\n[routing]\ndefault = \"containerd\"\n"
    );
    fs::write(&config, text).unwrap();
    let daemon = Command::new(env!("CARGO_BIN_EXE_kiyot"))
        .args(["serve", "--config"])
        .arg(&config)
        .env("KIYOT_LOG", "info")
        .stdin(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    (Daemon(daemon), move || fs::read_to_string(&log).unwrap_or_default())
}

/// Verifies O1, O3, O4.
#[tokio::test]
async fn metrics_of_a_pod_in_a_cell_and_health_are_served_over_http() {
    let node = Node::start().await;
    let options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
    let options = KiyotOptions { metrics: Some("127.0.0.1:0"), ..options };
    let mut kiyot = Kiyot::start(&node, options).await;
    let listen = address(|| kiyot.log()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script = Container::script("main", "trap 'exit 0' TERM; while :; do sleep 0.1; done");
    let running = kubelet.run_pod(&Pod::new("measured").in_cell().container(script)).await.unwrap();

    let page = wait_until("the first container is counted", LIMIT, async || {
        let (head, page) = request(listen, "GET /metrics").await;
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("openmetrics-text"), "{head}");
        let started = "kiyot_cell_start_seconds_count{step=\"first_container\",start=\"cold\"} 1";
        page.contains(started).then_some(page)
    })
    .await;
    let launches = page.lines().filter(|line| line.starts_with("kiyot_launches_total{"));
    let launched = "provider=\"netns\"";
    assert!(launches.clone().count() == 1 && page.contains(launched), "{page}");
    assert!(page.ends_with("# EOF\n"), "{page}");
    let found = samples(&page);
    for (sample, least) in [
        ("kiyot_cri_calls_total{method=\"RunPodSandbox\",backend=\"milpa\",code=\"OK\"}", 1.0),
        ("kiyot_cri_calls_total{method=\"Version\",backend=\"containerd\",code=\"OK\"}", 1.0),
        ("kiyot_cells{state=\"bound\"}", 1.0),
        ("kiyot_cells_limit", 1.0),
        ("kiyot_link_bytes_total{direction=\"received\"}", 1e3),
        ("kiyot_link_bytes_total{direction=\"sent\"}", 1e3),
        ("kiyot_images_bytes_total", 1e3),
        ("process_resident_memory_bytes", 1e6),
        ("process_cpu_seconds_total", 0.01),
    ] {
        assert!(found.get(sample).is_some_and(|value| *value >= least), "{sample}\n{page}");
    }
    let expected_here = |family: &str| {
        // These metrics are absent without the limit, price, cloud, access or budget that they
        // measure.
        let absent =
            ["kiyot_price_limit", "kiyot_api_call", "kiyot_kubernetes_call", "kiyot_budget_"];
        !absent.iter().any(|name| family.starts_with(name))
    };
    for family in metrics::ALL.iter().map(|metric| metric.family()) {
        let has_sample = found.keys().any(|sample| sample.starts_with(&family));
        assert!(has_sample || !expected_here(&family), "{family} has no sample\n{page}");
    }
    for (line, status, body) in [
        ("GET /healthz", "200", "ok"),
        ("GET /readyz", "200", "ok"),
        ("GET /", "404", "/metrics, /healthz, /readyz"),
        ("POST /metrics", "405", "GET, HEAD"),
    ] {
        let (head, found) = request(listen, line).await;
        assert!(head.contains(status) && found.contains(body), "{line}: {head} {found}");
    }

    // The address is taken. The daemon serves its socket at once, and the page when the address is
    // free.
    let (_other, log) = daemon_without_runtime(node.directory(), listen);
    wait_until("the taken address is logged", LIMIT, async || {
        log().contains("metrics.listen can't be listened on").then_some(())
    })
    .await;
    let socket = node.directory().join("other.sock");
    wait_until("the socket is served", LIMIT, async || UnixStream::connect(&socket).await.ok())
        .await;
    kubelet.stop_and_remove(&running).await.unwrap();
    kiyot.stop().await;
    assert_eq!(address(&log).await, listen);
    let (head, reason) = request(listen, "GET /readyz").await;
    assert!(head.contains("503") && reason.contains("14"), "{head} {reason}");
    let (head, _) = request(listen, "GET /healthz").await;
    assert!(head.contains("200"), "{head}");
}

/// Opens connections in an endless loop, holds the last 900, and sends nothing.
const HOLDER: &str = "
    held=()
    while exec {connection}<>/dev/tcp/127.0.0.1/$0; do
        held+=($connection)
        [ ${#held[@]} -lt 900 ] || { exec {held[0]}>&-; held=(${held[@]:1}); }
        [ ${#held[@]} -lt 600 ] || echo held
    done";

/// Verifies O9.
#[tokio::test]
async fn health_is_answered_while_a_process_endlessly_opens_and_holds_connections() {
    let node = Node::start().await;
    let options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
    let options = KiyotOptions { metrics: Some("127.0.0.1:0"), cells: false, ..options };
    let kiyot = Kiyot::start(&node, options).await;
    let listen = address(|| kiyot.log()).await;
    let mut first = TcpStream::connect(listen).await.unwrap();
    let mut holder = Command::new("bash")
        .args(["-c", HOLDER, &listen.port().to_string()])
        .uid(65_534)
        .gid(65_534)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut held = BufReader::new(holder.stdout.take().unwrap());
    let _holder = Daemon(holder);
    held.read_line(&mut String::new()).unwrap();
    // The output is read, so that the holder is not blocked.
    std::thread::spawn(move || std::io::copy(&mut held, &mut std::io::sink()));
    for _ in 0..50 {
        for path in ["/healthz", "/readyz", "/metrics"] {
            let (head, body) = request(listen, &format!("GET {path}")).await;
            assert!(head.starts_with("HTTP/1.1 200 OK"), "{path}: {head} {body}");
        }
    }
    let ended = first.read(&mut [0]).await.unwrap_err();
    assert_eq!(
        ended.kind(),
        std::io::ErrorKind::ConnectionReset,
        "the daemon has closed the first connection"
    );
}
