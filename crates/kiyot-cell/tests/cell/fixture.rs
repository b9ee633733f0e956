//! Launches cells and removes them, and calls an agent's service.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::TryStreamExt;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use kiyot_cell::{
    agent::{AgentContext, AgentParts, OpenBulk, service},
    dirs::CellDir,
    namespaces::OwnNamespaces,
    uplink::ConnectionInfo,
};
use kiyot_link::bootstrap::{Bootstrap, CellFile, GO, GatewayAddress};
use kiyot_proto::{
    cell::{ConnectionKind, ReadLogRequest, agent_client::AgentClient},
    cri::runtime_service_client::RuntimeServiceClient,
};
use kiyot_testkit::{LIMIT, Node, command, sweep, wait_until};
use tempfile::TempDir;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::image;

static CELLS: AtomicU32 = AtomicU32::new(0);

/// A launched cell. Dropping it removes all of its processes and files.
pub(crate) struct Cell {
    launcher: Child,
    dir: TempDir,
    name: String,
    netns: bool,
}

impl Cell {
    /// Launches a cell in a new network namespace.
    pub(crate) fn launch(orphan_timeout_secs: u64) -> Self {
        let name = name();
        command::run("ip", &["netns", "add", &name]);
        let netns = format!("/run/netns/{name}");
        Self::begin(name, &netns, orphan_timeout_secs, true)
    }

    /// Launches a cell in a given network namespace.
    pub(crate) fn launch_in(netns: &str, orphan_timeout_secs: u64) -> Self {
        Self::begin(name(), netns, orphan_timeout_secs, false)
    }

    fn begin(name: String, netns: &str, orphan_timeout_secs: u64, own_netns: bool) -> Self {
        let dir = tempfile::Builder::new().prefix(&name).tempdir().unwrap();
        let gateway = GatewayAddress::Unix(dir.path().join("gateway.sock"));
        let file = CellFile {
            bootstrap: Bootstrap {
                cell: name.clone(),
                gateway,
                ca_sha256: "00".repeat(32),
                token: "token".into(),
                orphan_timeout_secs,
                agent: None,
            },
            containerd: "containerd".into(),
            runc: "runc".into(),
            pause_image: image::PAUSE.into(),
            registry_config_dir: None,
            restrict_oom_score_adj: Node::restricts_oom_score(),
            cri: Default::default(),
            machine: None,
        };
        file.write(&dir.path().join("cell.json")).unwrap();
        let mut launcher = Command::new(env!("CARGO_BIN_EXE_kiyot-cell"))
            .args(["launch", "--netns", netns, "--cgroup", &name, "--dir"])
            .arg(dir.path())
            .env("PATH", command::PATH)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        launcher.stdin.take().unwrap().write_all(GO).unwrap();
        Self { launcher, dir, name, netns: own_netns }
    }

    /// Waits for the cell's init and returns its process id.
    pub(crate) async fn init(&self) -> u32 {
        let launcher = self.launcher.id();
        let path = format!("/proc/{launcher}/task/{launcher}/children");
        wait_until("the cell has an init", LIMIT, async || {
            fs::read_to_string(&path).ok()?.split_whitespace().next()?.parse().ok()
        })
        .await
    }

    /// Waits for the cell's containerd and returns its process id.
    pub(crate) async fn containerd(&self) -> u32 {
        let config = self.dir.path().join("private/containerd.toml").display().to_string();
        wait_until("containerd runs", LIMIT, async || {
            self.processes()
                .into_iter()
                .find(|(_, line)| line.starts_with("containerd ") && line.contains(&config))
                .map(|(pid, _)| pid)
        })
        .await
    }

    /// Returns the processes with the cell's name in their command line or cgroups, without the
    /// launcher and zombies.
    pub(crate) fn processes(&self) -> Vec<(u32, String)> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let read = |file: &str| {
                fs::read_to_string(entry.path().join(file)).unwrap_or_default().replace('\0', " ")
            };
            let (line, groups) = (read("cmdline"), read("cgroup"));
            let alive = !line.is_empty() && pid != self.launcher.id() && pid != std::process::id();
            if alive && (line.contains(&self.name) || groups.contains(&self.name)) {
                found.push((pid, line));
            }
        }
        found
    }

    pub(crate) fn kill_launcher(&mut self) {
        self.launcher.kill().unwrap();
        self.launcher.wait().unwrap();
    }

    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        self.launcher.try_wait().unwrap().map(|status| status.code().unwrap_or(-1))
    }

    pub(crate) fn console(&self) -> String {
        fs::read_to_string(self.dir.path().join("console.log")).unwrap_or_default()
    }

    pub(crate) fn pod_dir(&self) -> String {
        self.dir.path().canonicalize().unwrap().join("pod").display().to_string()
    }

    pub(crate) fn cgroup(&self) -> &str {
        &self.name
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the cell's console:\n{}", self.console());
            eprintln!(
                "its containerd:\n{}",
                command::tail(&self.dir.path().join("containerd.log"))
            );
        }
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
        if self.netns {
            let _ = command::output("ip", &["netns", "delete", &self.name]);
        }
        sweep::processes_of(std::slice::from_ref(&self.name));
        let begun = Instant::now();
        // A cgroup is busy until its last process has been reaped.
        while !remove_groups(&self.name) && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(10));
        }
        sweep::all_of(std::slice::from_ref(&self.name), self.dir.path());
    }
}

/// Removes the cgroups of this name in all hierarchies. Returns whether all are removed.
fn remove_groups(name: &str) -> bool {
    fn remove(dir: &Path) -> bool {
        let Ok(entries) = fs::read_dir(dir) else { return true };
        let inner =
            entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        inner.map(|entry| entry.path()).all(|inner| remove(&inner)) && fs::remove_dir(dir).is_ok()
    }
    let trees = fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten()
        .map(|tree| tree.path().join(name));
    std::iter::once(Path::new("/sys/fs/cgroup").join(name)).chain(trees).all(|group| remove(&group))
}

fn name() -> String {
    // The process id is not unique: the tests of each checkout run in their own PID namespace.
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    format!("kiyot-cell-{}-{}", &random[..8], CELLS.fetch_add(1, Ordering::Relaxed))
}

/// An agent for a cell in this process, called over a connection like the gateway's. (The cell's
/// own agent can't reach a gateway.)
pub(crate) struct AgentLink {
    channel: Channel,
    power_off: CancellationToken,
    _server: AbortOnDropHandle<()>,
}

impl AgentLink {
    pub(crate) async fn new(cell: &Cell, init: u32) -> Self {
        let root = PathBuf::from(format!("/proc/{init}/root"));
        let socket = root.join("run/containerd/containerd.sock");
        // containerd's socket exists only after the cell's directories and mounts.
        wait_until("containerd listens", LIMIT, async || socket.exists().then_some(())).await;
        let power_off = CancellationToken::new();
        let context = AgentContext::start(AgentParts {
            owns_machine: false,
            pause_image: image::PAUSE.into(),
            cell: cell.name.clone(),
            dir: CellDir::open(Path::new(cell.dir.path())).unwrap(),
            own: OwnNamespaces { uts: false, net: false },
            socket,
            stream_port: 1,
            bulk: OpenBulk::new(|| {}),
            power_off: power_off.clone(),
        })
        .unwrap();
        let (here, there) = tokio::io::duplex(64 * 1024);
        let connection = ConnectionInfo {
            kind: ConnectionKind::Control,
            generation: 1,
            incarnation: Arc::from("test"),
        };
        let service = TowerToHyperService::new(service(context, connection));
        let server = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(there), service)
                .await;
        }));
        let here = Mutex::new(Some(here));
        let connector = tower::service_fn(move |_: Uri| {
            let here = here.lock().unwrap().take();
            async move {
                here.map(TokioIo::new)
                    .ok_or_else(|| std::io::Error::other("the connection is already taken"))
            }
        });
        let channel =
            Endpoint::from_static("http://agent").connect_with_connector(connector).await.unwrap();
        Self { channel, power_off, _server: server }
    }

    pub(crate) fn agent(&self) -> AgentClient<Channel> {
        AgentClient::new(self.channel.clone())
    }

    pub(crate) fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone())
    }

    pub(crate) async fn agent_read(&self, request: ReadLogRequest) -> Vec<u8> {
        let parts: Vec<_> =
            self.agent().read_log(request).await.unwrap().into_inner().try_collect().await.unwrap();
        parts.into_iter().flat_map(|part| part.content).collect()
    }

    pub(crate) fn power_off(&self) -> &CancellationToken {
        &self.power_off
    }
}
