//! A node: a private containerd with its own directories, network and cgroups.

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
mod images;

pub use crate::image::{BUSYBOX_IMAGE, PAUSE_IMAGE};

/// The directory of programs for containerd, in the node's directory.
const PROGRAMS: &str = "programs";

/// Containerd's root directory, in the node's directory.
const ROOT: &str = "root";

/// Number of the next node's network in this process.
static NETWORKS: AtomicU8 = AtomicU8::new(0);

/// A running containerd of a test. The names of its processes, mounts, links, rules, cgroups and
/// directories contain its [`name`](Self::name). Dropping it removes them, even after a panic.
#[derive(Debug)]
pub struct Node {
    containerd: Mutex<Child>,
    cleanup: Cleanup,
    directory: PathBuf,
    _watchdog: Option<Watchdog>,
}

/// Resources to clean up: the directory, and all resources whose names contain one of `words`.
#[derive(Debug, Clone)]
struct Cleanup {
    directory: PathBuf,
    words: Arc<Mutex<Vec<String>>>,
}

impl Cleanup {
    fn words(&self) -> Vec<String> {
        self.words.lock().map(|words| words.clone()).unwrap_or_default()
    }

    fn sweep(&self) {
        sweep::all_of(&self.words(), &self.directory);
    }
}

impl Node {
    /// Starts a node with the images [`PAUSE_IMAGE`] and [`BUSYBOX_IMAGE`], and waits until its CRI
    /// answers.
    ///
    /// # Panics
    /// Without root and its own namespaces: a test fails without them, and is never skipped.
    pub async fn start() -> Self {
        Self::start_with(true, false).await
    }

    /// Starts a node whose containerd discards the layers of an image after it has pulled and
    /// unpacked the image (`discard_unpacked_layers`).
    pub async fn start_discarding_layers() -> Self {
        Self::start_with(true, true).await
    }

    /// Starts a node for a bench, without the watchdog.
    pub async fn start_for_long() -> Self {
        Self::start_with(false, false).await
    }

    async fn start_with(watched: bool, discards: bool) -> Self {
        let images = images::root().await;
        Self::start_on(Some(images), watched, discards).await
    }

    /// Starts a node on a copy of containerd's root directory, or on an empty one.
    async fn start_on(root: Option<&Path>, watched: bool, discards: bool) -> Self {
        assert!(
            rustix::process::geteuid().is_root() && std::env::var_os("OWN_NAMESPACES").is_some(),
            "this needs root and its own namespaces: run it by `cargo test`, whose runner is \
             scripts/runner"
        );
        let directory = tempfile::Builder::new()
            .prefix("kt")
            .tempdir()
            .map(TempDir::keep)
            .expect("a temporary directory can be made");
        let name = directory
            .file_name()
            .and_then(|name| name.to_str())
            .expect("temporary names are text")
            .trim_start_matches('.')
            .to_owned();
        let cleanup = Cleanup {
            directory: directory.clone(),
            words: Arc::new(Mutex::new(vec![name.clone()])),
        };
        let on_timeout = cleanup.clone();
        let watchdog = watched.then(|| {
            Watchdog::start(move || {
                eprintln!(
                    "log of containerd:\n{}",
                    command::tail(&on_timeout.directory.join("containerd.log"))
                );
                eprintln!(
                    "log of kiyot:\n{}",
                    command::tail(&on_timeout.directory.join("kiyot/kiyot.log"))
                );
                on_timeout.sweep();
            })
        });
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        configuration::write(&directory, &name, network, discards)
            .expect("the configuration can be written");
        if let Some(root) = root {
            images::copy(root, &directory.join(ROOT));
        }
        let containerd = Mutex::new(spawn(&directory));
        let node = Self { containerd, cleanup, directory, _watchdog: watchdog };
        node.wait_until_ready().await;
        node
    }

    /// Waits until containerd answers Version.
    async fn wait_until_ready(&self) {
        wait_until("containerd answers", LIMIT, async || {
            let mut kubelet = self.kubelet(&self.socket()).await.ok()?;
            kubelet.runtime.version(cri::VersionRequest::default()).await.ok()
        })
        .await;
    }

    /// Returns the word that is in the names of all resources of this node, short enough for a
    /// link.
    pub fn name(&self) -> String {
        self.cleanup.words().into_iter().next().unwrap_or_default()
    }

    /// Returns the directory of this node's files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the socket of containerd's API and CRI.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("containerd.sock")
    }

    /// Returns the kubelet's `--root-dir`.
    pub fn kubelet_directory(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    /// Returns the kubelet's `staticPodPath`.
    pub fn static_pods(&self) -> PathBuf {
        self.directory.join("static-pods")
    }

    /// Returns the kubelet's `podLogsDir`.
    pub fn pod_logs(&self) -> PathBuf {
        self.directory.join("pods")
    }

    /// Returns the directory of the node's CNI configuration.
    pub fn cni_configuration(&self) -> PathBuf {
        self.directory.join("cni/net.d")
    }

    /// Lists the allocated addresses of the node's network.
    pub fn addresses(&self) -> Vec<String> {
        let entries =
            fs::read_dir(self.directory.join("cni/state").join(self.name())).into_iter().flatten();
        entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with("10."))
            .collect()
    }

    /// Returns the directory of the node's registry configuration (`config_path`).
    pub fn registries(&self) -> PathBuf {
        self.directory.join("certs.d")
    }

    /// Returns the directory of the CNI plugins.
    pub fn cni_plugins() -> PathBuf {
        configuration::cni_plugins()
    }

    /// Returns whether OOM scores can only be raised, because CAP_SYS_RESOURCE is missing.
    pub fn restricts_oom_score() -> bool {
        configuration::restricts_oom_score()
    }

    /// Returns the process id of containerd.
    pub fn pid(&self) -> u32 {
        self.containerd.lock().expect("no thread panics with this lock").id()
    }

    /// Connects the kubelet of this node to a CRI socket.
    pub async fn kubelet(&self, socket: &Path) -> Result<Kubelet, tonic::transport::Error> {
        let directories = Directories {
            root: self.kubelet_directory(),
            logs: self.pod_logs(),
            cgroup: format!("kubepods-{}", self.name()),
            driver: CgroupDriver::of_machine(),
        };
        Kubelet::connect(socket, directories).await
    }

    /// Builds an image and imports it into containerd by its full name (`host/repository:tag`).
    pub async fn image(&self, name: &str, spec: &ImageSpec) {
        let archive =
            tempfile::NamedTempFile::new_in(&self.directory).expect("a temporary file can be made");
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

    /// Runs `ctr` in CRI's namespace and returns its output.
    pub fn ctr(&self, arguments: &[&str]) -> String {
        let socket = self.socket().display().to_string();
        command::run("ctr", &[&["--address", &socket, "--namespace", "k8s.io"], arguments].concat())
    }

    /// Returns the directory of programs that containerd runs instead of programs in its PATH.
    pub fn programs(&self) -> PathBuf {
        self.directory.join(PROGRAMS)
    }

    /// Kills containerd and starts it again. Its pods keep running.
    pub async fn restart_containerd(&self) {
        self.kill_containerd();
        self.start_containerd().await;
    }

    /// Kills containerd. Its pods keep running.
    pub fn kill_containerd(&self) {
        if let Ok(mut containerd) = self.containerd.lock() {
            let _ = containerd.kill();
            let _ = containerd.wait();
        }
    }

    /// Starts containerd after [`kill_containerd`](Self::kill_containerd).
    pub async fn start_containerd(&self) {
        *self.containerd.lock().expect("no thread panics with this lock") = spawn(&self.directory);
        self.wait_until_ready().await;
    }

    /// Adds a word, such as a cell's id. Resources whose names contain it are this node's.
    pub fn owns(&self, word: &str) {
        if let Ok(mut words) = self.cleanup.words.lock()
            && !words.iter().any(|known| known == word)
        {
            words.push(word.to_owned());
        }
    }

    /// Lists this node's resources on the host.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers::of_host().about(&self.cleanup.words())
    }

    /// Stops the node and returns its remaining resources: empty without a leak.
    pub fn stop(self) -> Leftovers {
        let cleanup = self.cleanup.clone();
        drop(self);
        Leftovers::of_host().about(&cleanup.words())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "log of containerd:\n{}",
                command::tail(&self.directory.join("containerd.log"))
            );
        }
        self.kill_containerd();
        self.cleanup.sweep();
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
        .env("PATH", format!("{}:{PATH}", directory.join(PROGRAMS).display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("containerd can be started: scripts/setup installs it")
}
