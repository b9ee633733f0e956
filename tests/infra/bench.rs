//! The fixture: a provider with unique names, and the list of resources that it holds on the node.

use std::{
    collections::BTreeMap,
    fs,
    hash::{BuildHasher, RandomState},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use kiyot::backends::milpa::gateway::{CellLink, ControlChannel, GatewayConfig, Limits, ca::Ca};
use kiyot_config::MilpaBackend;
use kiyot_engine::{
    id::{CellId, SandboxId},
    placement::{Candidate, Offering},
    provider::{
        Attachment, Instance, InstanceId, LaunchSpec, Provider, ProviderError, Termination,
    },
};
use kiyot_link::{
    bootstrap::{Bootstrap, CellFile, GatewayAddress},
    channel::Slot,
    clock::Clock,
};
use kiyot_local::{PauseImage, netns::Netns};

/// The time limit of every wait.
pub(crate) const LIMIT: Duration = kiyot_testkit::LIMIT;

/// A stub of `kiyot-cell`: joins its cgroup and its network namespace and sleeps, as a single
/// process or in a PID namespace whose init has a child.
const CELL_STUB: &str = r#"#!/bin/sh
set -e
[ "${1%-vm} $2 $4 $6" = "launch --dir --netns --cgroup" ]
dir=$3 netns=$5 cgroup=$7
read -r go
[ "$1" = launch ] || nsenter --net="$netns" ip tuntap add dev tap-pod mode tap
for mount in $(awk '$0 ~ / - cgroup2? /{print $5}' /proc/self/mountinfo); do
    echo $$ > "$mount/$cgroup/cgroup.procs"
done
echo "stub of $dir"
if [ -e "$dir/../../with-pid-namespace" ]; then
    exec nsenter --net="$netns" unshare --mount --pid --fork --kill-child --mount-proc sh -c "mount -t tmpfs none '$dir' -o size=1m; sleep 1000 & sleep 1001"
fi
exec nsenter --net="$netns" sleep 1000
"#;

/// A provider for a test.
pub(crate) struct Bench {
    dir: tempfile::TempDir,
    /// Nine letters and digits in all names of this test.
    pub(crate) name: String,
    pub(crate) config: MilpaBackend,
    pub(crate) provider: Netns,
    /// Two numbers from which the addresses of the networks are made.
    subnet: (u8, u8),
}

/// Returns the parameters of a launch.
pub(crate) fn launch_spec(cell: CellId, candidates: Vec<Offering>) -> LaunchSpec {
    let bootstrap = bootstrap(&cell, "secret");
    let candidates = candidates.into_iter().map(Candidate::free).collect();
    LaunchSpec { cell, candidates, tags: BTreeMap::new(), bootstrap, parameters: BTreeMap::new() }
}

/// Returns boot data that names a gateway without a listener.
pub(crate) fn bootstrap(cell: &CellId, token: &str) -> Bootstrap {
    Bootstrap {
        cell: cell.to_string(),
        gateway: GatewayAddress::Unix("/nowhere".into()),
        ca_sha256: String::new(),
        token: token.to_owned(),
        orphan_timeout_secs: 900,
        agent: None,
    }
}

/// Returns the configuration of a gateway for cells on this node.
pub(crate) fn gateway_config(socket: PathBuf, ca: Ca) -> GatewayConfig {
    GatewayConfig {
        socket,
        tcp: None,
        agent: None,
        ca,
        build_id: "daemon".to_owned(),
        orphan_timeout: Duration::from_secs(900),
        clock: Clock::default(),
        limits: Limits::default(),
    }
}

/// Returns the link to a cell whose agent never connects.
pub(crate) fn unconnected_link() -> CellLink {
    CellLink {
        control: ControlChannel::new("control"),
        bulk: Slot::new("bulk").channel(),
        lines: Arc::default(),
    }
}

/// An instance that was launched.
pub(crate) struct Launched {
    pub(crate) spec: LaunchSpec,
    pub(crate) attachment: Attachment,
    pub(crate) instance: Instance,
}

impl Bench {
    pub(crate) fn new() -> Self {
        static BENCHES: AtomicU8 = AtomicU8::new(0);
        assert_eq!(run("id", &["-u"]).trim(), "0", "these tests need root");
        let number = BENCHES.fetch_add(1, Ordering::SeqCst);
        // Not the PID: two runs in different PID namespaces may have the same PID, but they share
        // the cgroups, where their names must not collide.
        static RUN: LazyLock<u32> =
            LazyLock::new(|| RandomState::new().hash_one("the run") as u32 % 0xf_ffff);
        let run = *RUN;
        // The length is fixed, so that no name is a prefix of another.
        let name = format!("t{run:05x}n{number:02}");
        let dir = tempfile::tempdir().unwrap();
        let subnet = (u8::try_from(run % 200).unwrap(), number);
        let mut config =
            MilpaBackend { state_dir: dir.path().join("state"), ..MilpaBackend::default() };
        fs::create_dir(&config.state_dir).unwrap();
        let program = dir.path().join("kiyot-cell");
        fs::write(&program, CELL_STUB).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        config.netns.cell_binary = Some(program);
        config.netns.network.cni_conf_dir = dir.path().join("net.d");
        config.netns.network.bridge = format!("b{name}");
        config.netns.network.subnet =
            format!("172.{}.{}.0/24", 16 + subnet.0 % 16, subnet.0 / 16 * 16 + number % 16)
                .parse()
                .unwrap();
        let provider = Netns::new(&config, Arc::new(None::<PathBuf>), PauseImage::new(None));
        Self { dir, name, config, provider, subnet }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn cni_data(&self) -> PathBuf {
        self.path().join("cni-data")
    }

    /// Returns the bridge of the CNI configuration.
    pub(crate) fn cni_bridge(&self) -> String {
        format!("c{}", self.name)
    }

    pub(crate) fn cni_subnet(&self) -> String {
        format!("10.{}.{}.0/24", 20 + self.subnet.0, self.subnet.1)
    }

    /// Writes a CNI configuration with bridge, portmap and these further plugins.
    pub(crate) fn configure_cni(&mut self, more: &str) {
        self.write_cni(&format!(r#"[{{"subnet": "{}"}}]"#, self.cni_subnet()), more);
    }

    /// Writes a CNI configuration that gives pods an address of each kind.
    pub(crate) fn configure_dual_stack_cni(&self) {
        let v6 = format!("fd00:5e:{:x}:{:x}::/64", self.subnet.0, self.subnet.1);
        let ranges = format!(r#"[{{"subnet": "{}"}}], [{{"subnet": "{v6}"}}]"#, self.cni_subnet());
        self.write_cni(&ranges, "");
    }

    fn write_cni(&self, ranges: &str, more: &str) {
        fs::create_dir_all(&self.config.netns.network.cni_conf_dir).unwrap();
        let (name, bridge, data) = (&self.name, self.cni_bridge(), self.cni_data());
        let list = format!(
            r#"{{"cniVersion": "1.0.0", "name": "{name}", "plugins": [
                {{"type": "bridge", "bridge": "{bridge}", "isGateway": true, "ipMasq": true,
                  "ipam": {{"type": "host-local", "dataDir": "{}", "ranges": [{ranges}], "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
                {{"type": "portmap", "capabilities": {{"portMappings": true}}}}{more}]}}"#,
            data.display()
        );
        fs::write(self.config.netns.network.cni_conf_dir.join("10-test.conflist"), list).unwrap();
    }

    /// Adds a CNI plugin, in a directory that is searched first.
    pub(crate) fn add_plugin(&mut self, name: &str, script: &str) {
        let dir = self.path().join("plugins");
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        if self.config.netns.network.cni_bin_dirs.first() != Some(&dir) {
            self.config.netns.network.cni_bin_dirs.insert(0, dir);
        }
        self.provider = Netns::new(&self.config, Arc::new(None::<PathBuf>), PauseImage::new(None));
    }

    /// Simulates a restart of the daemon: a new provider knows only the files.
    pub(crate) fn restart(&mut self) {
        self.provider = Netns::new(&self.config, Arc::new(None::<PathBuf>), PauseImage::new(None));
    }

    pub(crate) async fn launch(&self) -> Launched {
        let candidates = self.provider.catalogue().await.unwrap().offerings().collect();
        let spec = launch_spec(CellId::mint().unwrap(), candidates);
        let instance = self.provider.launch(&spec, "token").await.unwrap();
        let sandbox = SandboxId::mint().unwrap().to_string();
        let pod_uid = format!("{}-{}", self.name, spec.cell);
        let attachment = Attachment {
            pod_name: "a-pod".into(),
            pod_namespace: "a-namespace".into(),
            pod_uid,
            sandbox,
            ..Attachment::default()
        };
        Launched { spec, attachment, instance }
    }

    /// Terminates an instance. If the call succeeds, asserts that the instance has ended.
    pub(crate) async fn end(&self, instance: &InstanceId) -> Result<(), ProviderError> {
        let mut outcomes = self.provider.terminate(std::slice::from_ref(instance)).await;
        let outcome = outcomes.remove(instance).unwrap();
        outcome.map(|progress| assert_eq!(progress, Termination::Confirmed))
    }

    pub(crate) fn instance_dir(&self, instance: &InstanceId) -> PathBuf {
        self.config.state_dir.join("cells").join(&instance.0)
    }

    /// Returns the PID of the launcher in the instance's record.
    pub(crate) fn launcher(&self, instance: &InstanceId) -> i32 {
        let record: serde_json::Value = serde_json::from_slice(
            &fs::read(self.instance_dir(instance).join("instance.json")).unwrap(),
        )
        .unwrap();
        i32::try_from(record["launcher"]["pid"].as_i64().unwrap()).unwrap()
    }

    /// Describes all resources of this fixture on the node, without resources of other programs.
    pub(crate) fn resources(&self) -> Vec<String> {
        let mut held = Vec::new();
        let cells = entries(&self.config.state_dir.join("cells"));
        held.extend(cells.iter().map(|cell| format!("directory {cell}")));
        held.extend(
            entries(&self.config.state_dir.join("addresses"))
                .iter()
                .map(|address| format!("address {address}")),
        );
        let reserved = entries(&self.cni_data().join(&self.name))
            .into_iter()
            .filter(|file| file.parse::<IpAddr>().is_ok());
        held.extend(reserved.map(|address| format!("CNI address {address}")));
        let links = run("ip", &["-o", "link"]);
        held.extend(
            links
                .lines()
                .filter(|link| {
                    link.contains(&format!("master {} ", self.cni_bridge()))
                        || link.contains(&self.config.netns.network.bridge)
                })
                .map(|link| format!("link {link}")),
        );
        let rules = run("iptables-save", &[]);
        let network = self.config.netns.network.subnet.address.to_string();
        let ours = [self.name.as_str(), network.as_str()];
        held.extend(
            rules
                .lines()
                .filter(|rule| {
                    ours.iter().any(|name| rule.contains(name)) && !rule.starts_with('#')
                })
                .map(|rule| format!("rule {rule}")),
        );
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dir = self.path().display().to_string();
        held.extend(
            mounts
                .lines()
                .filter(|mount| mount.contains(&dir))
                .map(|mount| format!("mount {mount}")),
        );
        held
    }

    /// Describes the resources of a cell on the node, which are found by its id alone.
    pub(crate) fn resources_of(&self, instance: &InstanceId) -> Vec<String> {
        let mut held = Vec::new();
        let id = &instance.0;
        held.extend(entries(Path::new("/run/netns")).into_iter().filter(|name| name.contains(id)));
        held.extend(
            cgroup_mounts()
                .iter()
                .map(|mount| mount.join("kiyot").join(id))
                .filter(|dir| dir.exists())
                .map(|dir| dir.display().to_string()),
        );
        let short = id.trim_start_matches("cell-");
        held.extend(
            run("ip", &["-o", "link"])
                .lines()
                .filter(|link| link.contains(short))
                .map(ToOwned::to_owned),
        );
        for process in
            entries(Path::new("/proc")).into_iter().filter(|name| name.parse::<u32>().is_ok())
        {
            let read = |file: &str| {
                fs::read(format!("/proc/{process}/{file}"))
                    .map(|content| String::from_utf8_lossy(&content).into_owned())
                    .unwrap_or_default()
            };
            // A zombie holds no resources.
            let is_zombie = read("stat")
                .rsplit(')')
                .next()
                .is_some_and(|rest| rest.trim_start().starts_with('Z'));
            if is_zombie {
                continue;
            }
            if read("cmdline").contains(id) || read("cgroup").contains(id) {
                held.push(format!("process {process} {}", read("cmdline").replace('\0', " ")));
            }
        }
        held
    }

    /// Asserts that no resource of an instance or of this fixture is left.
    pub(crate) fn assert_clean(&self, instance: &InstanceId) {
        assert_eq!(self.resources_of(instance), Vec::<String>::new());
        assert_eq!(self.resources(), Vec::<String>::new());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cells =
                fs::read_dir(self.config.state_dir.join("cells")).into_iter().flatten().flatten();
            let words: Vec<_> =
                cells.filter_map(|cell| cell.file_name().into_string().ok()).collect();
            kiyot_testkit::sweep::all_of(&words, &self.config.state_dir);
        }
        // The CNI plugin never deletes its bridge.
        let _ = Command::new("ip").args(["link", "delete", &self.cni_bridge()]).output();
    }
}

/// Reads the cell file of an instance.
pub(crate) fn cell_file(dir: &Path) -> CellFile {
    CellFile::read(&dir.join("cell.json")).unwrap()
}

/// Asserts that the node can connect to a listener in a cell's network.
pub(crate) fn assert_reachable(instance: &InstanceId, address: IpAddr) {
    let netns = fs::File::open(format!("/run/netns/kiyot-{}", instance.0)).unwrap();
    let listener = std::thread::spawn(move || {
        // Changes the namespace of this thread only.
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        TcpListener::bind((address, 0)).unwrap()
    });
    let listener = listener.join().unwrap();
    let port = listener.local_addr().unwrap().port();
    TcpStream::connect_timeout(&SocketAddr::from((address, port)), LIMIT).unwrap();
    listener.accept().unwrap();
}

pub(crate) fn cgroup_mounts() -> Vec<PathBuf> {
    run("awk", &["$0 ~ / - cgroup2? /{print $5}", "/proc/self/mountinfo"])
        .lines()
        .map(PathBuf::from)
        .collect()
}

/// Runs a program, which must succeed, and returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits until a condition holds.
pub(crate) async fn wait_for(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    kiyot_testkit::wait_until(what, LIMIT, async || condition().await.then_some(())).await;
}
