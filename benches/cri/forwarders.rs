//! Forwarders between the client and containerd.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use clap::ValueEnum;
use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, command::PATH, cri, wait_until};

use super::client::{Call, Client};

/// Kind of a forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ForwarderKind {
    /// No forwarder.
    Direct,
    /// The daemon of this project.
    Kiyot,
    /// The daemon without metrics.
    MetricsOff,
    /// Another build of the daemon, see `--baseline`.
    #[value(skip)]
    Baseline,
    /// nginx with `grpc_pass`, one worker.
    Nginx,
    /// haproxy with HTTP/2 on both sides, one thread.
    Haproxy,
    /// socat, which copies bytes.
    Socat,
}

/// A running forwarder.
#[derive(Debug)]
pub(crate) struct Forwarder<'a> {
    /// Name in the tables.
    pub(crate) name: &'static str,
    /// Socket of its CRI.
    pub(crate) socket: PathBuf,
    process: Process<'a>,
}

#[derive(Debug)]
enum Process<'a> {
    None,
    Kiyot(Box<Kiyot<'a>>),
    Other(Child),
}

impl Forwarder<'_> {
    /// Prints the resident memory of its processes.
    pub(crate) fn print_memory(&self) {
        let (pid, whole) = match &self.process {
            Process::None => return,
            Process::Kiyot(kiyot) => (kiyot.pid(), "the daemon"),
            Process::Other(child) => (child.id(), "its first process with its children"),
        };
        let children =
            fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let pids =
            [pid.to_string()].into_iter().chain(children.split_whitespace().map(str::to_owned));
        let kib: u64 = pids.filter_map(|pid| resident_kib(&pid)).sum();
        println!("memory of {}: {:.1} MiB resident ({whole})", self.name, kib as f64 / 1024.0);
    }
}

impl Drop for Forwarder<'_> {
    fn drop(&mut self) {
        if let Process::Other(child) = &mut self.process {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn resident_kib(pid: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?
        .trim()
        .split(' ')
        .next()?
        .parse()
        .ok()
}

/// Starts forwarders, and waits until each answers.
pub(crate) async fn start<'a>(
    node: &'a Node,
    kinds: &[ForwarderKind],
    baseline: Option<&Path>,
) -> Vec<Forwarder<'a>> {
    let own = Path::new(env!("CARGO_BIN_EXE_kiyot"));
    let mut forwarders = Vec::new();
    for kind in kinds.iter().chain(baseline.map(|_| &ForwarderKind::Baseline)) {
        let forwarder = match kind {
            ForwarderKind::Direct => {
                Forwarder { name: "direct", socket: node.socket(), process: Process::None }
            }
            ForwarderKind::Kiyot => kiyot(node, "kiyot", own, Some("127.0.0.1:0")).await,
            ForwarderKind::MetricsOff => kiyot(node, "metrics-off", own, Some("off")).await,
            ForwarderKind::Baseline => match baseline {
                // The other build may not know the metrics' configuration.
                Some(program) => kiyot(node, "baseline", program, None).await,
                None => continue,
            },
            ForwarderKind::Nginx => spawn(node, "nginx", &nginx(node), |file| {
                ["-c", file, "-e", "stderr"].map(str::to_owned).to_vec()
            }),
            ForwarderKind::Haproxy => spawn(node, "haproxy", &haproxy(node), |file| {
                ["-q", "-f", file].map(str::to_owned).to_vec()
            }),
            ForwarderKind::Socat => {
                let (socket, containerd) = (node.directory().join("socat.sock"), node.socket());
                let (listen, connect) = (
                    format!("UNIX-LISTEN:{},fork", socket.display()),
                    format!("UNIX-CONNECT:{}", containerd.display()),
                );
                spawn(node, "socat", "", |_| {
                    vec!["-b".to_owned(), "65536".to_owned(), listen.clone(), connect.clone()]
                })
            }
        };
        let version = Call::new("Version", &cri::VersionRequest::default());
        wait_until(format!("{} answers", forwarder.name), LIMIT, async || {
            Client::connect(&forwarder.socket).await?.call(&version).await
        })
        .await;
        forwarders.push(forwarder);
    }
    forwarders
}

async fn kiyot<'a>(
    node: &'a Node,
    name: &'static str,
    program: &Path,
    metrics: Option<&'static str>,
) -> Forwarder<'a> {
    let options = KiyotOptions::new(program);
    let options = KiyotOptions { log: "warn".to_owned(), name, metrics, ..options };
    let kiyot = Kiyot::start(node, options).await;
    Forwarder { name, socket: kiyot.socket(), process: Process::Kiyot(Box::new(kiyot)) }
}

fn spawn<'a>(
    node: &Node,
    name: &'static str,
    configuration: &str,
    arguments: impl Fn(&str) -> Vec<String>,
) -> Forwarder<'a> {
    let file = node.directory().join(format!("{name}.conf"));
    fs::write(&file, configuration).unwrap();
    let process = Command::new(name)
        .args(arguments(&file.display().to_string()))
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("{name} can't be started ({error}): `scripts/setup bench` installs it")
        });
    Forwarder {
        name,
        socket: node.directory().join(format!("{name}.sock")),
        process: Process::Other(process),
    }
}

fn nginx(node: &Node) -> String {
    format!(
        r"user root;
worker_processes 1;
daemon off;
pid {at}/nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {at}/nginx-body;
    proxy_temp_path {at}/nginx-proxy;
    fastcgi_temp_path {at}/nginx-fastcgi;
    uwsgi_temp_path {at}/nginx-uwsgi;
    scgi_temp_path {at}/nginx-scgi;
    upstream containerd {{
        server unix:{containerd};
        keepalive 64;
        keepalive_requests 1000000000;
        keepalive_time 24h;
    }}
    server {{
        listen unix:{at}/nginx.sock http2;
        keepalive_requests 1000000000;
        keepalive_time 24h;
        client_max_body_size 0;
        grpc_read_timeout 1h;
        location / {{ grpc_pass grpc://containerd; }}
    }}
}}
",
        at = node.directory().display(),
        containerd = node.socket().display(),
    )
}

fn haproxy(node: &Node) -> String {
    format!(
        "global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    http-reuse always
frontend cri
    bind unix@{at}/haproxy.sock proto h2
    default_backend containerd
backend containerd
    server containerd unix@{containerd} proto h2
",
        at = node.directory().display(),
        containerd = node.socket().display(),
    )
}
