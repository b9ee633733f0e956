//! A node: a private containerd, with directories, a network and control groups of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
    },
};

use tempfile::TempDir;

use crate::{
    Kubelet, LIMIT, Leftovers,
    command::{self, PATH},
    cri,
    image::ImageSpec,
    kubelet::{CgroupDriver, Directories},
    sweep, wait_until,
    watchdog::Watchdog,
};

mod configuration;

/// The pause image of every node.
pub const PAUSE_IMAGE: &str = "kiyot.test/pause:1";

/// The image that pods run when a test doesn't say another.
pub const BUSYBOX_IMAGE: &str = "kiyot.test/busybox:1";

/// Networks of this process so far: each node has one of its own.
static NETWORKS: AtomicU8 = AtomicU8::new(0);

/// A running containerd of one test. Everything of it has its [`name`](Self::name) in it, and goes
/// when it is dropped: processes, mounts, links, rules, control groups, directories; after a panic
/// too.
#[derive(Debug)]
pub struct Node {
    containerd: Mutex<Child>,
    own: Own,
    kept: PathBuf,
    _watchdog: Option<Watchdog>,
}

/// What must be cleaned up.
#[derive(Debug, Clone)]
struct Own {
    directory: PathBuf,
    words: Arc<Mutex<Vec<String>>>,
}

impl Own {
    fn words(&self) -> Vec<String> {
        self.words.lock().map(|words| words.clone()).unwrap_or_default()
    }

    fn sweep(&self) {
        sweep::all_of(&self.words(), &self.directory);
    }
}

impl Node {
    /// Starts one, with the images [`PAUSE_IMAGE`] and [`BUSYBOX_IMAGE`], and waits until its CRI
    /// answers.
    ///
    /// # Panics
    /// Without root and namespaces of its own: a test that needs them fails, it is never skipped.
    pub async fn start() -> Self {
        Self::begin(true, false).await
    }

    /// The same, whose containerd discards the layers of an image that it has pulled and unpacked
    /// (`discard_unpacked_layers`).
    pub async fn start_discarding_layers() -> Self {
        Self::begin(true, true).await
    }

    /// The same for a bench, which may take as long as it wants.
    pub async fn start_for_long() -> Self {
        Self::begin(false, false).await
    }

    async fn begin(watched: bool, discards: bool) -> Self {
        assert!(
            rustix::process::geteuid().is_root() && std::env::var_os("OWN_NAMESPACES").is_some(),
            "this needs root, and namespaces of its own: run it by `cargo test`, whose runner is scripts/runner"
        );
        let kept = tempfile::Builder::new()
            .prefix("kt")
            .tempdir()
            .map(TempDir::keep)
            .expect("a temporary directory can be made");
        let name = kept
            .file_name()
            .and_then(|name| name.to_str())
            .expect("temporary names are text")
            .trim_start_matches('.')
            .to_owned();
        let own = Own { directory: kept.clone(), words: Arc::new(Mutex::new(vec![name.clone()])) };
        let last = own.clone();
        let watchdog = watched.then(|| {
            Watchdog::start(move || {
                eprintln!(
                    "containerd said:\n{}",
                    command::tail(&last.directory.join("containerd.log"))
                );
                eprintln!(
                    "kiyot said:\n{}",
                    command::tail(&last.directory.join("kiyot/kiyot.log"))
                );
                last.sweep();
            })
        });
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        configuration::write(&kept, &name, network, discards)
            .expect("the configuration can be written");
        let containerd = Mutex::new(spawn(&kept));
        let node = Self { containerd, own, kept, _watchdog: watchdog };
        node.answering().await;
        node.image(PAUSE_IMAGE, &ImageSpec::pause()).await;
        node.image(
            BUSYBOX_IMAGE,
            &ImageSpec { cmd: vec!["sh".to_owned()], ..ImageSpec::default() },
        )
        .await;
        node
    }

    async fn answering(&self) {
        wait_until("containerd answers", LIMIT, async || {
            let mut kubelet = self.kubelet(&self.socket()).await.ok()?;
            kubelet.runtime.version(cri::VersionRequest::default()).await.ok()
        })
        .await;
    }

    /// A word that is in the name of everything of this node, short enough for a link.
    pub fn name(&self) -> String {
        self.own.words().into_iter().next().unwrap_or_default()
    }

    /// The directory in which everything of this node is.
    pub fn directory(&self) -> &Path {
        &self.kept
    }

    /// The socket of containerd: its API and its CRI.
    pub fn socket(&self) -> PathBuf {
        self.kept.join("containerd.sock")
    }

    /// The kubelet's `--root-dir`.
    pub fn kubelet_directory(&self) -> PathBuf {
        self.kept.join("kubelet")
    }

    /// The kubelet's `podLogsDir`.
    pub fn pod_logs(&self) -> PathBuf {
        self.kept.join("pods")
    }

    /// Where the node's CNI configuration is.
    pub fn cni_configuration(&self) -> PathBuf {
        self.kept.join("cni/net.d")
    }

    /// The addresses that the node's network has given away.
    pub fn addresses(&self) -> Vec<String> {
        let entries =
            fs::read_dir(self.kept.join("cni/state").join(self.name())).into_iter().flatten();
        entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with("10."))
            .collect()
    }

    /// Where the node's registries and their mirrors are configured.
    pub fn registries(&self) -> PathBuf {
        self.kept.join("certs.d")
    }

    /// Where the node's CNI plugins are.
    pub fn cni_plugins() -> PathBuf {
        configuration::cni_plugins()
    }

    /// Must an OOM score be raised only? True where CAP_SYS_RESOURCE is missing.
    pub fn restricts_oom_score() -> bool {
        configuration::restricts_oom_score()
    }

    /// The process id of containerd.
    pub fn pid(&self) -> u32 {
        self.containerd.lock().expect("no thread panics with this lock").id()
    }

    /// The kubelet of this node, which calls CRI at this socket.
    pub async fn kubelet(&self, socket: &Path) -> Result<Kubelet, tonic::transport::Error> {
        let directories = Directories {
            root: self.kubelet_directory(),
            logs: self.pod_logs(),
            cgroup: format!("kubepods-{}", self.name()),
            driver: CgroupDriver::of_machine(),
        };
        Kubelet::connect(socket, directories).await
    }

    /// Makes an image and gives it to containerd under this whole name (`host/repository:tag`).
    pub async fn image(&self, name: &str, spec: &ImageSpec) {
        let archive =
            tempfile::NamedTempFile::new_in(&self.kept).expect("a temporary file can be made");
        spec.write(name, archive.path()).expect("an image archive can be written");
        self.ctr(&["images", "import", &archive.path().display().to_string()]);
        wait_until(format!("containerd's CRI knows the image {name}"), LIMIT, async || {
            let image = Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() });
            let mut kubelet = self.kubelet(&self.socket()).await.ok()?;
            kubelet
                .image
                .image_status(cri::ImageStatusRequest { image, verbose: false })
                .await
                .ok()?
                .into_inner()
                .image
        })
        .await;
    }

    /// Runs containerd's own client in CRI's namespace and gives its output.
    pub fn ctr(&self, arguments: &[&str]) -> String {
        let socket = self.socket().display().to_string();
        command::run("ctr", &[&["--address", &socket, "--namespace", "k8s.io"], arguments].concat())
    }

    /// Kills containerd, waits, and starts it again; its pods go on.
    pub async fn restart_containerd(&self) {
        self.kill_containerd();
        self.start_containerd().await;
    }

    /// Kills containerd; its pods go on.
    pub fn kill_containerd(&self) {
        if let Ok(mut containerd) = self.containerd.lock() {
            let _ = containerd.kill();
            let _ = containerd.wait();
        }
    }

    /// Starts containerd after [`kill_containerd`](Self::kill_containerd).
    pub async fn start_containerd(&self) {
        *self.containerd.lock().expect("no thread panics with this lock") = spawn(&self.kept);
        self.answering().await;
    }

    /// Counts everything with this word in its name as this node's: the id of a cell, for one.
    pub fn owns(&self, word: &str) {
        if let Ok(mut words) = self.own.words.lock()
            && !words.iter().any(|known| known == word)
        {
            words.push(word.to_owned());
        }
    }

    /// What there is of this node on the host now.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers::of_host().about(&self.own.words())
    }

    /// Ends everything and gives what is left of it: nothing, if the kit is right.
    pub fn stop(self) -> Leftovers {
        let own = self.own.clone();
        drop(self);
        Leftovers::of_host().about(&own.words())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("containerd said:\n{}", command::tail(&self.kept.join("containerd.log")));
        }
        self.kill_containerd();
        self.own.sweep();
    }
}

fn spawn(directory: &Path) -> Child {
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(directory.join("containerd.log"))
        .expect("a log can be written");
    Command::new("containerd")
        .arg("--config")
        .arg(directory.join("containerd.toml"))
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("containerd can be started: scripts/setup installs it")
}
