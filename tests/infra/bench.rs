//! What the tests stand on: a provider with names of its own, and a look at what it holds of the
//! node.

use std::{
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

use kiyot::{
    backends::milpa::{
        id::{CellId, SandboxId},
        providers::{Attachment, Instance, InstanceId, LaunchSpec, Provider, netns::Netns},
    },
    config::MilpaBackend,
};
use kiyot_link::bootstrap::{Bootstrap, CellFile, GatewayAddress};

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Joins its cgroup and its network, and stays: as one process, or with a PID namespace whose first
/// process has a child of its own.
const STAND_IN: &str = r#"#!/bin/sh
set -e
[ "$1 $2 $4 $6" = "launch --dir --netns --cgroup" ]
dir=$3 netns=$5 cgroup=$7
read -r go
for mount in $(awk '$0 ~ / - cgroup2? /{print $5}' /proc/self/mountinfo); do
    echo $$ > "$mount/$cgroup/cgroup.procs"
done
echo "stand-in of $dir"
if [ -e "$dir/../../with-pid-namespace" ]; then
    exec nsenter --net="$netns" unshare --mount --pid --fork --kill-child --mount-proc sh -c "mount -t tmpfs none '$dir' -o size=1m; sleep 1000 & sleep 1001"
fi
exec nsenter --net="$netns" sleep 1000
"#;

/// A provider for one test.
pub(crate) struct Bench {
    dir: tempfile::TempDir,
    /// Nine letters and digits that are in all names of this test.
    pub(crate) name: String,
    pub(crate) config: MilpaBackend,
    pub(crate) provider: Netns,
    /// The first two numbers of the addresses.
    subnet: (u8, u8),
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
        // Not the process's id, which is one of its own namespace: names of two runs must not meet
        // in the control groups.
        static RUN: LazyLock<u32> =
            LazyLock::new(|| RandomState::new().hash_one("the run") as u32 % 0xf_ffff);
        let run = *RUN;
        // As long for each: no name is the begin of another one.
        let name = format!("t{run:05x}n{number:02}");
        let dir = tempfile::tempdir().unwrap();
        let subnet = (u8::try_from(run % 200).unwrap(), number);
        let mut config =
            MilpaBackend { state_dir: dir.path().join("state"), ..MilpaBackend::default() };
        fs::create_dir(&config.state_dir).unwrap();
        let program = dir.path().join("kiyot-cell");
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        config.netns.cell_binary = Some(program);
        config.netns.cni_conf_dir = dir.path().join("net.d");
        config.netns.bridge = format!("b{name}");
        config.netns.subnet =
            format!("172.{}.{}.0/24", 16 + subnet.0 % 16, subnet.0 / 16 * 16 + number % 16)
                .parse()
                .unwrap();
        let provider = Netns::new(&config, Arc::new(None::<PathBuf>));
        Self { dir, name, config, provider, subnet }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn cni_data(&self) -> PathBuf {
        self.path().join("cni-data")
    }

    /// The bridge of the CNI configuration.
    pub(crate) fn cni_bridge(&self) -> String {
        format!("c{}", self.name)
    }

    pub(crate) fn cni_subnet(&self) -> String {
        format!("10.{}.{}.0/24", 20 + self.subnet.0, self.subnet.1)
    }

    /// A node with CNI configuration: bridge and portmap, and whatever plugins come after.
    pub(crate) fn configure_cni(&mut self, more: &str) {
        fs::create_dir_all(&self.config.netns.cni_conf_dir).unwrap();
        let (name, bridge, subnet, data) =
            (&self.name, self.cni_bridge(), self.cni_subnet(), self.cni_data());
        let list = format!(
            r#"{{"cniVersion": "1.0.0", "name": "{name}", "plugins": [
                {{"type": "bridge", "bridge": "{bridge}", "isGateway": true, "ipMasq": true,
                  "ipam": {{"type": "host-local", "dataDir": "{}", "ranges": [[{{"subnet": "{subnet}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
                {{"type": "portmap", "capabilities": {{"portMappings": true}}}}{more}]}}"#,
            data.display()
        );
        fs::write(self.config.netns.cni_conf_dir.join("10-test.conflist"), list).unwrap();
    }

    /// A directory of plugins of the test's own, which is looked at first.
    pub(crate) fn add_plugin(&mut self, name: &str, script: &str) {
        let dir = self.path().join("plugins");
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        if self.config.netns.cni_bin_dirs.first() != Some(&dir) {
            self.config.netns.cni_bin_dirs.insert(0, dir);
        }
        self.provider = Netns::new(&self.config, Arc::new(None::<PathBuf>));
    }

    /// The daemon starts anew: nothing but the files is known.
    pub(crate) fn restart(&mut self) {
        self.provider = Netns::new(&self.config, Arc::new(None::<PathBuf>));
    }

    pub(crate) async fn launch(&self) -> Launched {
        let cell = CellId::mint().unwrap();
        let bootstrap = Bootstrap {
            cell: cell.to_string(),
            gateway: GatewayAddress::Unix("/nowhere".into()),
            ca_sha256: String::new(),
            token: "secret".into(),
            orphan_timeout_secs: 900,
        };
        let spec = LaunchSpec { cell, bootstrap };
        let instance = self.provider.launch(&spec, "token").await.unwrap();
        let sandbox = SandboxId::mint().unwrap().to_string();
        let pod_uid = format!("{}-{}", self.name, spec.cell);
        let attachment = Attachment {
            pod_name: "a-pod".into(),
            pod_namespace: "a-namespace".into(),
            pod_uid,
            sandbox,
            ports: Vec::new(),
            cgroup_parent: String::new(),
        };
        Launched { spec, attachment, instance }
    }

    pub(crate) fn instance_dir(&self, instance: &InstanceId) -> PathBuf {
        self.config.state_dir.join("cells").join(&instance.0)
    }

    /// The process that is written down as the instance's.
    pub(crate) fn launcher(&self, instance: &InstanceId) -> i32 {
        let known: serde_json::Value = serde_json::from_slice(
            &fs::read(self.instance_dir(instance).join("instance.json")).unwrap(),
        )
        .unwrap();
        i32::try_from(known["launcher"]["pid"].as_i64().unwrap()).unwrap()
    }

    /// All that this bench has on the node now, in words. Other programs' things are left out.
    pub(crate) fn held(&self) -> Vec<String> {
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
                        || link.contains(&self.config.netns.bridge)
                })
                .map(|link| format!("link {link}")),
        );
        let rules = run("iptables-save", &[]);
        let network = self.config.netns.subnet.address.to_string();
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

    /// What is on the node of one cell, by its id alone.
    pub(crate) fn held_of(&self, instance: &InstanceId) -> Vec<String> {
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
            let says = |file: &str| {
                fs::read(format!("/proc/{process}/{file}"))
                    .map(|content| String::from_utf8_lossy(&content).into_owned())
                    .unwrap_or_default()
            };
            // One that its parent has not looked after yet holds nothing.
            let ended = says("stat")
                .rsplit(')')
                .next()
                .is_some_and(|rest| rest.trim_start().starts_with('Z'));
            if ended {
                continue;
            }
            if says("cmdline").contains(id) || says("cgroup").contains(id) {
                held.push(format!("process {process} {}", says("cmdline").replace('\0', " ")));
            }
        }
        held
    }

    /// Nothing is left of an instance, nor of anything else of this bench.
    pub(crate) fn assert_clean(&self, instance: &InstanceId) {
        assert_eq!(self.held_of(instance), Vec::<String>::new());
        assert_eq!(self.held(), Vec::<String>::new());
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
        // CNI's bridge stays by its plugin's design.
        let _ = Command::new("ip").args(["link", "delete", &self.cni_bridge()]).output();
    }
}

/// What the cell was told.
pub(crate) fn cell_file(dir: &Path) -> CellFile {
    CellFile::read(&dir.join("cell.json")).unwrap()
}

/// A listener in a cell's network answers the node.
pub(crate) fn assert_reachable(instance: &InstanceId, address: IpAddr) {
    let netns = fs::File::open(format!("/run/netns/kiyot-{}", instance.0)).unwrap();
    let listener = std::thread::spawn(move || {
        // Of this thread alone.
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        TcpListener::bind((address, 0)).unwrap()
    });
    let listener = listener.join().unwrap();
    let port = listener.local_addr().unwrap().port();
    TcpStream::connect_timeout(&SocketAddr::from((address, port)), PATIENCE).unwrap();
    listener.accept().unwrap();
}

pub(crate) fn cgroup_mounts() -> Vec<PathBuf> {
    run("awk", &["$0 ~ / - cgroup2? /{print $5}", "/proc/self/mountinfo"])
        .lines()
        .map(PathBuf::from)
        .collect()
}

/// What a program prints; it must succeed.
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

/// Waits until something holds.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    kiyot_testkit::wait_until(what, PATIENCE, async || holds().await.then_some(())).await;
}
