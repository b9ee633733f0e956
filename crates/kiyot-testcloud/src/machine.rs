//! Instances as namespaces or virtual machines. Namespaces have their own root over the host's, an
//! interface in the VPC, and the launch's user-data. A virtual machine's disk reads all of this
//! itself.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use kiyot_testkit::{command, output};
use tokio::{
    process::{Child, Command},
    sync::watch,
    task::{self, JoinSet},
    time::{sleep, timeout},
};

use crate::{
    instance::{Instance, State},
    proxy::power,
    query::Query,
    shared::{ImageFile, Shared},
    vpc::{self, BridgedSubnet, NAMESPACE, Vpc},
};

mod qemu;

pub use qemu::Disk;

/// Programs of an instance, by their names.
const GUEST: [(&str, &str); 4] = [
    ("boot", include_str!("machine/guest/boot")),
    ("init", include_str!("machine/guest/init")),
    ("run-unit", include_str!("machine/guest/run-unit")),
    ("systemctl", include_str!("machine/guest/systemctl")),
];

/// Period of the checks of an instance's state.
const STATE_POLL_PERIOD: Duration = Duration::from_millis(20);

/// Time within which the kernel must free the cgroups of ended processes.
const CGROUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Boots and ends machines as the instances' states require, until `closing` is set.
pub(crate) async fn run(shared: Arc<Shared>, vpc: Arc<Vpc>, closing: watch::Receiver<bool>) {
    let mut machines = JoinSet::new();
    while !*closing.borrow() {
        while let Some(ended) = machines.try_join_next() {
            if let Err(error) = ended {
                eprintln!("machine of an instance: {error}");
            }
        }
        for instance in to_boot(&shared) {
            machines.spawn(live(instance, Arc::clone(&shared), Arc::clone(&vpc), closing.clone()));
        }
        let _ = timeout(STATE_POLL_PERIOD, shared.changed.notified()).await;
    }
    while machines.join_next().await.is_some() {}
}

/// Returns the instances that wait for their boot, and marks them as booting.
fn to_boot(shared: &Shared) -> Vec<Instance> {
    let mut state = shared.lock();
    let waiting = state
        .instances
        .values_mut()
        .filter(|instance| instance.state == State::Pending && instance.held && !instance.booting);
    waiting
        .map(|instance| {
            instance.booting = true;
            instance.clone()
        })
        .collect()
}

/// Boots a machine, and ends it when its instance ends or stops.
async fn live(
    instance: Instance,
    shared: Arc<Shared>,
    vpc: Arc<Vpc>,
    mut closing: watch::Receiver<bool>,
) {
    let machine = Machine::new(&instance, &shared);
    let prepared = {
        let (machine, instance, vpc) = (machine.clone(), instance.clone(), Arc::clone(&vpc));
        task::spawn_blocking(move || machine.prepare(&instance, &vpc)).await
    };
    let child = match prepared {
        Ok(Ok(())) => machine.boot(&shared),
        Ok(Err(error)) => Err(error),
        Err(error) => Err(error.to_string()),
    };
    match child {
        Ok(mut child) => {
            with(&shared, &instance.id, |instance| {
                if instance.state == State::Pending {
                    instance.held = false;
                }
                instance.boots += 1;
            });
            tokio::select! {
                _ = child.wait() => {}
                () = end_requested(&instance.id, &shared) => {}
                _ = closing.wait_for(|closing| *closing) => {}
            }
            // With the init, the kernel ends all processes in the PID namespace.
            let _ = child.kill().await;
        }
        Err(error) => {
            let _ = fs::write(shared.console(&instance.id), format!("no boot: {error}\n"));
            eprintln!("instance {}: {error}", instance.id);
        }
    }
    let keeps_root = ended(&instance.id, &shared).await;
    let removed = machine.clone();
    let _ = task::spawn_blocking(move || removed.remove(keeps_root, &vpc)).await;
    with(&shared, &instance.id, |instance| {
        instance.held = false;
        instance.booting = false;
    });
}

fn with(shared: &Shared, id: &str, change: impl FnOnce(&mut Instance)) {
    if let Some(instance) = shared.lock().instances.get_mut(id) {
        change(instance);
    }
    shared.changed.notify_waiters();
}

async fn end_requested(id: &str, shared: &Shared) {
    let ending = [State::ShuttingDown, State::Stopping];
    while shared.lock().instance(id).is_some_and(|instance| !ending.contains(&instance.state)) {
        sleep(STATE_POLL_PERIOD).await;
    }
}

/// Handles the end of a machine as a shutdown from within, unless the end was requested. Returns
/// whether the instance can be started again.
async fn ended(id: &str, shared: &Shared) -> bool {
    let action = {
        let mut state = shared.lock();
        let delay = state.faults.shutting_down_for;
        let Some(instance) = state.instance(id) else { return false };
        let action = match instance.state {
            State::Pending | State::Running if instance.stops_on_shutdown => {
                instance.state = State::Stopping;
                instance.settles = Some(Instant::now());
                Some("StopInstances")
            }
            State::Pending | State::Running => {
                instance.state = State::ShuttingDown;
                instance.settles = Instant::now().checked_add(delay);
                Some("TerminateInstances")
            }
            _ => None,
        };
        if action.is_some() {
            instance.held = true;
            let code = "Client.InstanceInitiatedShutdown";
            let message = format!("{code}: Instance initiated shutdown");
            instance.reason = (code.to_owned(), message);
        }
        action
    };
    if let Some(action) = action {
        let query = Query::new(action, &[("InstanceId.1", id)]);
        let failed = match action {
            "TerminateInstances" => power::remove(&query, None, shared).await.err().map(drop),
            _ => shared.moto(&query, None).await.err().map(drop),
        };
        if failed.is_some() {
            eprintln!("{action} {id}: moto does not answer");
        }
    }
    shared.lock().instance(id).is_some_and(|instance| instance.state == State::Stopping)
}

/// Files and names of a machine.
#[derive(Debug, Clone)]
struct Machine {
    id: String,
    directory: PathBuf,
    host_name: String,
    link: String,
    mac: String,
    files: Vec<ImageFile>,
    /// Set for a virtual machine.
    disk: Option<Disk>,
}

impl Machine {
    fn new(instance: &Instance, shared: &Shared) -> Self {
        // Names of links have at most 15 characters.
        let tail = instance.id.trim_start_matches("i-");
        let (files, disk) = {
            let state = shared.lock();
            (state.image_files.clone(), state.disk.clone())
        };
        Self {
            id: instance.id.clone(),
            directory: shared.directory.join("roots").join(&instance.id),
            host_name: format!("ip-{}", instance.address.replace('.', "-")),
            link: format!("ve{}", &tail[..tail.len().min(12)]),
            mac: instance.mac.clone(),
            files,
            disk,
        }
    }

    /// Makes the directories and the interface.
    fn prepare(&self, instance: &Instance, vpc: &Vpc) -> Result<(), String> {
        let subnet = vpc.subnet(&instance.subnet)?;
        match &self.disk {
            Some(_) => self.prepare_qemu(vpc)?,
            None => self.prepare_namespaces(instance, subnet)?,
        }
        vpc.plug(&self.id, instance.port(&self.link, &subnet.bridge))
    }

    /// Makes a virtual machine's directory for the disk's changes, and its interface.
    fn prepare_qemu(&self, vpc: &Vpc) -> Result<(), String> {
        fs::create_dir_all(&self.directory)
            .map_err(|error| format!("{}: {error}", self.directory.display()))?;
        vpc.ip(&["tuntap", "add", "dev", &self.link, "mode", "tap"])
    }

    /// Makes the root's directories and the interface of namespaces.
    fn prepare_namespaces(
        &self,
        instance: &Instance,
        subnet: &BridgedSubnet,
    ) -> Result<(), String> {
        let files = || -> io::Result<()> {
            for name in ["root", "upper", "work", "tmp", "lib", "systemd/system", "guest"] {
                fs::create_dir_all(self.directory.join(name))?;
            }
            fs::set_permissions(self.directory.join("tmp"), fs::Permissions::from_mode(0o1777))?;
            for (name, text) in GUEST {
                let path = self.directory.join("guest").join(name);
                fs::write(&path, text)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
            }
            if instance.boots == 0 {
                self.files.iter().try_for_each(|file| self.add(file))?;
            }
            let user_data = STANDARD.decode(&instance.user_data).unwrap_or_default();
            if instance.boots == 0 && user_data.starts_with(b"#!") {
                let path = self.directory.join("user-data");
                fs::write(&path, user_data)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
            }
            Ok(())
        };
        files().map_err(|error| format!("{}: {error}", self.directory.display()))?;
        let (id, link) = (self.id.as_str(), self.link.as_str());
        let address = format!("{}/{}", instance.address, subnet.prefix);
        ip(&["netns", "add", id])?;
        let inner = ["peer", "name", "eth0", "netns", id];
        let outer = ["link", "add", link, "netns", NAMESPACE, "type", "veth"];
        ip(&[&outer[..], &inner].concat())?;
        ip(&["-n", id, "link", "set", "eth0", "address", &instance.mac, "up"])?;
        ip(&["-n", id, "address", "add", &address, "dev", "eth0"])?;
        ip(&["-n", id, "route", "add", "default", "via", &subnet.gateway])
    }

    /// Writes a file of the image into the root's layer for its path.
    fn add(&self, file: &ImageFile) -> io::Result<()> {
        let path = match file.path.strip_prefix("/etc/systemd/") {
            Some(path) => self.directory.join("systemd").join(path),
            None => self.directory.join("upper").join(file.path.trim_start_matches('/')),
        };
        fs::create_dir_all(path.parent().unwrap_or(&self.directory))?;
        fs::write(&path, &file.content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(file.mode))
    }

    fn boot(&self, shared: &Shared) -> Result<Child, String> {
        let console = fs::File::options()
            .create(true)
            .append(true)
            .open(shared.console(&self.id))
            .map_err(|error| error.to_string())?;
        let copy = console.try_clone().map_err(|error| error.to_string())?;
        let words = match &self.disk {
            Some(disk) => {
                let machine = qemu::Machine { id: &self.id, mac: &self.mac, tap: &self.link };
                let command = disk.command(machine, &shared.console(&self.id), &self.directory);
                ["nsenter".to_owned(), vpc::namespace_option()].into_iter().chain(command).collect()
            }
            None => self.in_namespaces(),
        };
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .args(words)
            .env_clear()
            .env("PATH", command::PATH)
            .env("HOME", "/root")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(copy)
            .stderr(console)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("setpriv: {error}"))
    }

    /// Returns the command that boots in namespaces.
    fn in_namespaces(&self) -> Vec<String> {
        let network = format!("--net=/run/netns/{}", self.id);
        let directory = self.directory.display();
        let boot = format!("{directory}/guest/boot");
        let unshare = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"];
        [&["nsenter", &network, "unshare"][..], &unshare, &["sh", &boot, &self.id]]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .chain([directory.to_string(), self.host_name.clone()])
            .collect()
    }

    /// Removes the interface, the cgroups and, unless `keeps_root`, the root.
    fn remove(&self, keeps_root: bool, vpc: &Vpc) {
        if let Err(error) = vpc.unplug(&self.id) {
            eprintln!("port of {}: {error}", self.id);
        }
        let _ = ip(&["netns", "delete", &self.id]);
        let begun = Instant::now();
        for group in cgroups(&self.id) {
            while let Err(error) = remove_cgroup(&group) {
                if begun.elapsed() > CGROUP_TIMEOUT {
                    eprintln!("{}: {error}", group.display());
                    break;
                }
                std::thread::sleep(STATE_POLL_PERIOD);
            }
        }
        if !keeps_root && let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("{}: {error}", self.directory.display());
        }
    }
}

pub(crate) fn ip(arguments: &[&str]) -> Result<(), String> {
    output("ip", arguments).map(drop)
}

/// Lists the existing cgroups of an instance in all hierarchies.
fn cgroups(id: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    hierarchies
        .chain([root.to_owned()])
        .map(|hierarchy| hierarchy.join(format!("kiyot-testcloud-{id}")))
        .filter(|group| group.is_dir())
        .collect()
}

/// Removes a cgroup and its children.
fn remove_cgroup(group: &Path) -> io::Result<()> {
    for entry in fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}
