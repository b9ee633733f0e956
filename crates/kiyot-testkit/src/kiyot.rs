//! The daemon as a process, in front of a node's containerd.

use std::{
    fmt::Write,
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    Kubelet, LIMIT, Node,
    command::{self, PATH},
    cri,
    image::PAUSE_IMAGE,
    sweep, wait_until,
};

/// Provider of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// Namespaces of the node.
    Netns,
    /// Virtual machines, with the image of [`cell_image`].
    Qemu,
    /// Instances of EC2, with the keys in [`KiyotOptions::of_provider`].
    Ec2,
}

impl Provider {
    /// Returns the provider in the environment variable `PROVIDER`. With `qemu`, the tests that
    /// suit any cell run with virtual machines.
    ///
    /// # Panics
    /// If the variable names an unknown provider.
    pub fn of_environment() -> Self {
        match std::env::var("PROVIDER").as_deref() {
            Ok("qemu") => Self::Qemu,
            Ok("ec2") => Self::Ec2,
            Ok("netns") | Err(_) => Self::Netns,
            Ok(other) => panic!("PROVIDER={other}: allowed: netns, qemu, ec2"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Netns => "netns",
            Self::Qemu => "qemu",
            Self::Ec2 => "ec2",
        }
    }

    /// Returns the machine's keys in the provider's table.
    fn keys(self) -> String {
        match self {
            Self::Netns => format!("restrict_oom_score_adj = {}", Node::restricts_oom_score()),
            Self::Qemu => format!("image_dir = \"{}\"\naccel = \"tcg\"", cell_image().display()),
            Self::Ec2 => String::new(),
        }
    }

    /// Returns whether the provider's cells are in the node's CNI network.
    fn has_node_network(self) -> bool {
        self != Self::Ec2
    }
}

/// Returns the directory of the cell image.
///
/// # Panics
/// If the image was not built.
pub fn cell_image() -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/cell-image");
    let directory = directory.canonicalize().unwrap_or(directory);
    assert!(
        directory.join("image.json").exists(),
        "{} has no image: build it first by `make cell-image`",
        directory.display()
    );
    directory
}

/// Options of the daemon.
#[derive(Debug, Clone)]
pub struct KiyotOptions {
    /// Path of the daemon. `kiyot-cell` must be beside it.
    pub binary: PathBuf,
    /// Adds a milpa backend to the configuration.
    pub cells: bool,
    /// Key `listen` of `[metrics]`, off by default because many daemons run at a time; `None`
    /// writes no section, for older builds.
    pub metrics: Option<&'static str>,
    /// Additional keys of `[server]`, TOML.
    pub server: String,
    /// Additional keys of `[backends.milpa]`, TOML.
    pub milpa: String,
    /// Key `pause_image` of `[backends.milpa]`; `None`: the node's runtime has it.
    pub pause_image: Option<&'static str>,
    /// Provider of cells.
    pub provider: Provider,
    /// Additional keys of the provider's table, TOML.
    pub of_provider: String,
    /// The preferred provider of two, with additional keys of its table.
    pub preferred: Option<(Provider, String)>,
    /// CRI socket of the backend `containerd`; `None`: the node's containerd.
    pub containerd: Option<PathBuf>,
    /// CNI network of cells: a directory with configuration in `net.d` and plugins in `bin`;
    /// `None`: the node's network.
    pub network: Option<PathBuf>,
    /// Additional sections, TOML.
    pub sections: String,
    /// A configuration file, such as an example, that is used unchanged. Environment variables set
    /// the node's paths. All options except `binary` and `log` are ignored.
    pub file: Option<PathBuf>,
    /// Additional environment variables of the daemon.
    pub environment: Vec<(String, String)>,
    /// The log filter, as in `KIYOT_LOG`.
    pub log: String,
    /// The name of the daemon's directory, unique among the daemons of a node.
    pub name: &'static str,
}

impl KiyotOptions {
    /// Returns the defaults: cells of the provider `netns` for pods that opt in. Tests and benches
    /// get the path from `env!("CARGO_BIN_EXE_kiyot")`.
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        Self {
            binary: binary.into(),
            cells: true,
            server: String::new(),
            metrics: Some("off"),
            milpa: String::new(),
            pause_image: Some(PAUSE_IMAGE),
            provider: Provider::of_environment(),
            of_provider: String::new(),
            preferred: None,
            containerd: None,
            network: None,
            sections: String::new(),
            file: None,
            environment: Vec::new(),
            log: "info,kiyot=debug,kiyot_link=debug".to_owned(),
            name: "kiyot",
        }
    }

    fn configuration(&self, node: &Node, directory: &Path) -> String {
        let at = directory.display();
        let containerd = self.containerd.clone().unwrap_or_else(|| node.socket());
        let mut toml = format!("[server]\nlisten = \"{at}/kiyot.sock\"\n{}\n", self.server);
        if let Some(listen) = self.metrics {
            let _ = writeln!(toml, "[metrics]\nlisten = \"{listen}\"\n");
        }
        let _ = writeln!(
            toml,
            "[backends.containerd]\ntype = \"cri\"\nsocket = \"{}\"\n",
            containerd.display()
        );
        if self.cells {
            let of_node = || (node.cni_configuration(), Node::cni_plugins());
            let (networks, plugins) = self
                .network
                .as_ref()
                .map_or_else(of_node, |own| (own.join("net.d"), own.join("bin")));
            let network = format!(
                "cni_conf_dir = \"{}\"\ncni_bin_dirs = [\"{}\"]",
                networks.display(),
                plugins.display()
            );
            let network = |provider: Provider| match provider.has_node_network() {
                true => network.as_str(),
                false => "",
            };
            let preferred = self.preferred.iter().map(|(provider, keys)| {
                let (name, network) = (provider.name(), network(*provider));
                format!("[backends.milpa.{name}]\n{network}\n{}\n{keys}\n\n", provider.keys())
            });
            let preferred: String = preferred.collect();
            let own = self.provider.name();
            // Older builds have only the key `provider`.
            let providers = match &self.preferred {
                None => format!("provider = {own:?}"),
                Some((first, _)) => format!("providers = [{:?}, {own:?}]", first.name()),
            };
            let pause_image = self
                .pause_image
                .map(|name| format!("pause_image = {name:?}\n"))
                .unwrap_or_default();
            let _ = writeln!(
                toml,
                "[backends.milpa]\n\
                 type = \"milpa\"\n\
                 state_dir = \"{at}/state\"\n\
                 {providers}\n\
                 {pause_image}\
                 kubelet_dir = \"{}\"\n\
                 {}\n\n\
                 {preferred}\
                 [backends.milpa.{provider}]\n\
                 {network}\n\
                 {}\n\
                 {}\n",
                node.kubelet_directory().display(),
                self.milpa,
                self.provider.keys(),
                self.of_provider,
                provider = self.provider.name(),
                network = network(self.provider),
            );
        }
        let _ = writeln!(toml, "[routing]\ndefault = \"containerd\"\n");
        if self.cells {
            toml.push_str(
                "[[routing.rule]]\n\
                 name = \"opted in\"\n\
                 annotation = { \"kubernetes.io/target-runtime\" = \"kiyot\" }\n\
                 backend = \"milpa\"\n\n",
            );
        }
        toml + &self.sections
    }
}

/// Returns environment variables that set a node's paths in an example's configuration.
fn node_variables(node: &Node, directory: &Path) -> Vec<(&'static str, String)> {
    let text = |path: &Path| format!("{:?}", path.display().to_string());
    vec![
        ("KIYOT_SERVER__LISTEN", text(&directory.join("kiyot.sock"))),
        ("KIYOT_METRICS__LISTEN", "\"off\"".to_owned()),
        ("KIYOT_BACKENDS__CONTAINERD__SOCKET", text(&node.socket())),
        ("KIYOT_BACKENDS__MILPA__STATE_DIR", text(&directory.join("state"))),
        ("KIYOT_BACKENDS__MILPA__PAUSE_IMAGE", format!("{PAUSE_IMAGE:?}")),
        ("KIYOT_BACKENDS__MILPA__KUBELET_DIR", text(&node.kubelet_directory())),
        ("KIYOT_BACKENDS__MILPA__NETNS__CNI_CONF_DIR", text(&node.cni_configuration())),
        ("KIYOT_BACKENDS__MILPA__NETNS__CNI_BIN_DIRS", format!("[{}]", text(&Node::cni_plugins()))),
        (
            "KIYOT_BACKENDS__MILPA__NETNS__RESTRICT_OOM_SCORE_ADJ",
            Node::restricts_oom_score().to_string(),
        ),
    ]
}

/// A running daemon. Dropping it kills the daemon and its cells, and prints its log if the test
/// panics.
#[derive(Debug)]
pub struct Kiyot<'a> {
    node: &'a Node,
    options: KiyotOptions,
    directory: PathBuf,
    daemon: Child,
}

impl<'a> Kiyot<'a> {
    /// Writes a configuration, starts the daemon and waits until its socket answers Version.
    pub async fn start(node: &'a Node, options: KiyotOptions) -> Self {
        let cell = options.binary.with_file_name("kiyot-cell");
        for binary in [&options.binary, &cell] {
            assert!(
                binary.exists(),
                "{} is missing: build it first by `cargo build --workspace --bins`",
                binary.display()
            );
        }
        let directory = node.directory().join(options.name);
        fs::create_dir_all(&directory).expect("a directory can be made");
        let configuration = match &options.file {
            Some(file) => fs::read_to_string(file).expect("the configuration can be read"),
            None => options.configuration(node, &directory),
        };
        fs::write(directory.join("kiyot.toml"), configuration)
            .expect("a configuration can be written");
        let daemon = spawn(node, &options, &directory);
        let mut kiyot = Self { node, options, directory, daemon };
        kiyot.wait_until_ready().await;
        kiyot
    }

    /// Returns the CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("kiyot.sock")
    }

    /// Returns the milpa backend's `state_dir`.
    pub fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Returns the configuration file. A test may change it before [`restart`](Self::restart).
    pub fn configuration(&self) -> PathBuf {
        self.directory.join("kiyot.toml")
    }

    /// Returns the log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("kiyot.log")).unwrap_or_default()
    }

    /// Returns the daemon's process id.
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// Connects the node's kubelet to this daemon.
    ///
    /// # Panics
    /// If the connection fails.
    pub async fn kubelet(&self) -> Kubelet {
        self.node.kubelet(&self.socket()).await.expect("the daemon takes connections")
    }

    /// Lists the existing cells by the names of their directories.
    pub fn cells(&self) -> Vec<String> {
        let entries = fs::read_dir(self.state().join("cells")).into_iter().flatten().flatten();
        let cells: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        cells.iter().for_each(|cell| self.node.owns(cell));
        cells
    }

    /// Kills the daemon with SIGKILL. Its cells stay.
    pub fn kill9(&mut self) {
        self.cells();
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }

    /// Sends SIGTERM and waits for the daemon's exit.
    pub async fn stop(&mut self) -> ExitStatus {
        self.cells();
        if let Some(pid) = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        self.wait().await
    }

    /// Waits for the daemon's exit.
    pub async fn wait(&mut self) -> ExitStatus {
        wait_until("the daemon has ended", LIMIT, async || self.daemon.try_wait().ok().flatten())
            .await
    }

    /// Replaces a part of the configuration file, sends SIGHUP, and waits until the daemon has
    /// logged the reload's outcome.
    ///
    /// # Panics
    /// If the file does not contain the part.
    pub async fn reload(&self, part: &str, with: &str) {
        let before =
            fs::read_to_string(self.configuration()).expect("the configuration can be read");
        assert!(before.contains(part), "the configuration has no {part:?}:\n{before}");
        fs::write(self.configuration(), before.replacen(part, with, 1))
            .expect("the configuration can be written");
        let said = |log: &str| {
            log.matches("configuration reloaded").count()
                + log.matches("configuration reload failed").count()
        };
        let until_now = said(&self.log());
        if let Some(pid) = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::HUP);
        }
        wait_until("the daemon has read its configuration again", LIMIT, async || {
            (said(&self.log()) > until_now).then_some(())
        })
        .await;
    }

    /// Starts the daemon again after [`kill9`](Self::kill9) or [`stop`](Self::stop), and waits
    /// until it is ready.
    pub async fn start_again(&mut self) {
        self.daemon = spawn(self.node, &self.options, &self.directory);
        self.wait_until_ready().await;
    }

    /// Stops the daemon and starts it again.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Waits until the daemon answers Version, then until its admin socket is open or logged as
    /// failed.
    async fn wait_until_ready(&mut self) {
        let (node, socket, log) = (self.node, self.socket(), self.directory.join("kiyot.log"));
        wait_until("the daemon answers Version", LIMIT, async || {
            if let Ok(Some(status)) = self.daemon.try_wait() {
                panic!("the daemon has ended: {status}; its log ends:\n{}", command::tail(&log));
            }
            node.kubelet(&socket)
                .await
                .ok()?
                .runtime
                .version(cri::VersionRequest::default())
                .await
                .ok()
        })
        .await;
        let admin = self.socket().with_file_name("admin.sock");
        wait_until("the admin socket is open or has failed", LIMIT, async || {
            let is_open = UnixStream::connect(&admin).is_ok();
            (is_open || self.log().contains("admin API can't be served")).then_some(())
        })
        .await;
    }
}

impl Drop for Kiyot<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of kiyot:\n{}", command::tail(&self.directory.join("kiyot.log")));
            for cell in self.cells() {
                eprintln!(
                    "console of {cell}:\n{}",
                    command::tail(&self.state().join("cells").join(&cell).join("console.log"))
                );
            }
        }
        self.kill9();
        // Cells outlive the daemon by design. The node removes the other resources of cells.
        sweep::processes_of(&[self.directory.display().to_string()]);
    }
}

fn spawn(node: &Node, options: &KiyotOptions, directory: &Path) -> Child {
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(directory.join("kiyot.log"))
        .expect("a log can be written");
    let mut command = Command::new(&options.binary);
    // Variables of the caller must not change the configuration.
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KIYOT_"))
    {
        command.env_remove(name);
    }
    command
        .arg("serve")
        .arg("--config")
        .arg(directory.join("kiyot.toml"))
        .env("PATH", PATH)
        .env("KIYOT_LOG", &options.log);
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    if options.file.is_some() {
        command.envs(node_variables(node, directory));
    }
    let errors = log.try_clone().expect("a file can be opened twice");
    command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .expect("the daemon can be started")
}
