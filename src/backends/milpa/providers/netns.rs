//! The netns provider: cells that are sets of namespaces on this node.
//!
//! The instance of a cell is a process `kiyot-cell launch` with the processes in its namespaces;
//! its id is the cell's id. Everything that is known of it is in its directory: see `instance`.

use std::{
    collections::HashMap,
    io::{PipeWriter, Write},
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_link::bootstrap::{CellFile, GO};
use ring::digest::{SHA256, digest};
use tokio::{process::Command, task::spawn_blocking};

use super::{
    Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, InstanceState,
    LaunchSpec, Provider, ProviderError, RegistryConfig, Termination, Terminations,
};
use crate::{
    backends::milpa::{
        id::CellId,
        placement::{Catalogue, Market, Offering},
    },
    config::MilpaBackend,
};

mod cgroup;
mod command;
#[doc(hidden)]
pub mod fuzzing;
mod instance;
mod listing;
mod mounts;
mod network;
mod process;
mod removal;
mod shortage;
mod slice;
mod sweep;

use instance::{Home, Known};
use listing::Listing;
use network::{Networks, bridge::Bridge, namespace};
use process::Identity;
use removal::Removal;

/// The path of the cells' program, if it is not beside the daemon's.
const CELL_BINARY: &str = "/usr/libexec/kiyot/kiyot-cell";
/// The file name of the cells' program.
const CELL_NAME: &str = "kiyot-cell";

/// The capabilities of netns cells. They share the node's kernel, devices and users, so that power
/// over these in a cell is power over the node, and over the agent. What the node says of them is
/// certain at once.
pub const CAPABILITIES: Capabilities = Capabilities {
    provider: "netns",
    own_kernel: false,
    own_users: false,
    own_devices: false,
    separate_link: false,
    can_be_paused: true,
    pods_control_agent: true,
    ends_with_node: true,
    ends_confirmed_within: Duration::from_secs(10),
    not_found_believed_after: Duration::ZERO,
    listing_period: Duration::from_secs(2),
    tags_at_launch_only: true,
};

/// The provider of cells that are namespaces of this node.
#[derive(Debug)]
pub struct Netns {
    /// The parent of the instances' directories.
    cells: PathBuf,
    program: PathBuf,
    settings: Settings,
    registries: Arc<dyn RegistryConfig>,
    networks: Networks,
    listing: Arc<Listing>,
    removal: Removal,
    /// Serialises the calls for each instance.
    busy: Mutex<HashMap<CellId, Arc<tokio::sync::Mutex<()>>>>,
}

/// The node's configuration for cells.
#[derive(Debug, Clone)]
struct Settings {
    containerd: PathBuf,
    runc: PathBuf,
    pause_image: String,
    restrict_oom_score_adj: bool,
}

/// Returns the node's boot id, which changes at each boot; empty if the kernel has none. Read once:
/// later there may be no free file descriptor to read it.
pub fn boot_id() -> String {
    static READ: OnceLock<String> = OnceLock::new();
    READ.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|id| id.trim().to_owned())
            .unwrap_or_default()
    })
    .clone()
}

impl Netns {
    /// Returns the configured provider. Has no side effects.
    pub fn new(config: &MilpaBackend, registries: Arc<dyn RegistryConfig>) -> Self {
        let netns = &config.netns;
        // The configuration allows IPv4 networks only.
        let network = if let IpAddr::V4(network) = netns.subnet.address {
            network
        } else {
            Ipv4Addr::new(10, 200, 0, 0)
        };
        Self {
            cells: config.state_dir.join("cells"),
            program: netns.cell_binary.clone().unwrap_or_else(found_program),
            settings: Settings {
                containerd: netns.containerd.clone(),
                runc: netns.runc.clone(),
                pause_image: config.pause_image.clone(),
                restrict_oom_score_adj: netns.restrict_oom_score_adj,
            },
            registries,
            networks: Networks {
                cni_conf_dir: netns.cni_conf_dir.clone(),
                cni_bin_dirs: netns.cni_bin_dirs.clone(),
                bridge: Bridge {
                    device: netns.bridge.clone(),
                    network,
                    prefix: netns.subnet.prefix,
                    addresses: config.state_dir.join("addresses"),
                },
                bridge_lock: tokio::sync::Mutex::default(),
                ports_lock: tokio::sync::Mutex::default(),
            },
            listing: Arc::default(),
            removal: Removal::new(config.state_dir.join("removed")),
            busy: Mutex::default(),
        }
    }

    /// Returns the directory of an instance; an error for an id that is not of this provider.
    fn home(&self, instance: &InstanceId) -> Result<Home, ProviderError> {
        let cell = CellId::parse(&instance.0).map_err(|error| {
            ProviderError::new(ErrorClass::NotFound, "look up an instance", error)
        })?;
        Ok(Home::new(&self.cells, &cell))
    }

    /// Waits until no other call uses an instance.
    async fn alone(&self, cell: &CellId) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            busy.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(busy.entry(cell.clone()).or_default())
        };
        lock.lock_owned().await
    }

    /// Creates an instance.
    async fn make(
        &self,
        home: &Home,
        spec: &LaunchSpec,
        token_sha256: String,
    ) -> Result<(), ProviderError> {
        let doing = || format!("make the instance of {}", home.cell());
        home.make().map_err(|error| ProviderError::transient(doing(), error))?;
        self.removal.prepare().map_err(|error| ProviderError::transient(doing(), error))?;
        let Settings { containerd, runc, pause_image, restrict_oom_score_adj } =
            self.settings.clone();
        let registry_config_dir = self.registries.config_path().await;
        let file = CellFile {
            bootstrap: spec.bootstrap.clone(),
            containerd,
            runc,
            pause_image,
            registry_config_dir,
            restrict_oom_score_adj,
            machine: None,
        };
        file.write(&home.cell_file()).map_err(|error| ProviderError::transient(doing(), error))?;
        let hierarchies =
            cgroup::hierarchies().map_err(|error| ProviderError::transient(doing(), error))?;
        cgroup::make(&hierarchies, home.cell())
            .map_err(|error| ProviderError::transient(doing(), error))?;
        namespace::make(&home.netns_name(), home.dir())
            .await
            .map_err(|error| ProviderError::transient(doing(), error))?;
        let (launcher, go) = self.spawn(home)?;
        home.keep(&Known { token_sha256, boot_id: boot_id(), launcher, ..Known::default() })?;
        // The launcher waits for this, so that it has no effect before it is recorded. If it has
        // exited, the list of instances shows it.
        let _ = (&go).write_all(GO);
        Ok(())
    }

    /// Starts the cell's program, which waits for [`GO`] from the returned pipe. It outlives the
    /// daemon, unless the pipe closes before.
    fn spawn(&self, home: &Home) -> Result<(Option<Identity>, PipeWriter), ProviderError> {
        let failed = |error| {
            ProviderError::new(
                ErrorClass::Invalid,
                format!("start {}", self.program.display()),
                error,
            )
        };
        let console = home.open_console().map_err(failed)?;
        let mut command = Command::new(&self.program);
        command
            .arg("launch")
            .arg("--dir")
            .arg(home.dir())
            .arg("--netns")
            .arg(home.netns_path())
            .arg("--cgroup")
            .arg(cgroup::name(home.cell()));
        command.current_dir("/").process_group(0);
        let (gate, go) = std::io::pipe().map_err(failed)?;
        command.stdin(gate).stdout(console.try_clone().map_err(failed)?).stderr(console);
        // The dropped child is reaped by the runtime.
        let child = command.kill_on_drop(false).spawn().map_err(failed)?;
        let launcher = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .map_or(Ok(None), Identity::of)
            .map_err(failed)?;
        Ok((launcher, go))
    }
}

#[async_trait]
impl Provider for Netns {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        Ok(Catalogue::any_size(offering()))
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let home = Home::new(&self.cells, &spec.cell);
        let _alone = self.alone(&spec.cell).await;
        let token_sha256 = hex::encode(digest(&SHA256, token.as_bytes()));
        let looked = home.known().and_then(|known| Ok((known.launcher().runs(&spec.cell)?, known)));
        let (running, known) = looked.map_err(|error| {
            ProviderError::transient(format!("look at the instance of {}", home.cell()), error)
        })?;
        if !(running && known.token_sha256 == token_sha256) {
            // Removes the remains of an unfinished launch or of a launch with another token.
            sweep::sweep(self, &home).await?;
            self.make(&home, spec, token_sha256).await?;
        }
        Ok(instance_of(&spec.cell, InstanceState::Running))
    }

    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        let home = self.home(instance)?;
        let _alone = self.alone(home.id()).await;
        let there = home.dir().try_exists();
        if !there.map_err(|error| {
            ProviderError::transient(format!("look for the instance of {}", home.cell()), error)
        })? {
            return Err(not_found("attach", &home));
        }
        let addresses = self.networks.attach(&home, to).await?;
        let hierarchies = cgroup::hierarchies()
            .map_err(|error| ProviderError::transient("read the cgroup hierarchies", error))?;
        slice::keep_controllers(&home, &hierarchies, &to.cgroup_parent).await?;
        Ok(Attached::already_made(addresses))
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        // The termination is awaited, and releases everything.
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        // The first list finds the remains of the previous daemon's instances.
        self.removal.wake();
        let (cells, listing) = (self.cells.clone(), Arc::clone(&self.listing));
        let listing = spawn_blocking(move || listing.list(&cells));
        let failed =
            |error| ProviderError::transient(format!("list {}", self.cells.display()), error);
        listing.await.map_err(std::io::Error::other).map_err(failed)?.map_err(failed)
    }

    async fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        let home = self.home(id)?;
        let looked_up = home.dir().try_exists().and_then(|exists| {
            Ok(if exists { Some(home.known()?.launcher().runs(home.id())?) } else { None })
        });
        match looked_up {
            Ok(Some(true)) => Ok(instance_of(home.id(), InstanceState::Running)),
            Ok(Some(false)) => Ok(instance_of(home.id(), InstanceState::Stopped)),
            Ok(None) => Err(not_found("describe", &home)),
            Err(error) => Err(ProviderError::transient(format!("describe {}", home.cell()), error)),
        }
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let mut outcomes = Terminations::new();
        for instance in instances {
            let outcome = match self.home(instance) {
                // No instance of this provider has such an id.
                Err(_) => Ok(Termination::Confirmed),
                Ok(home) => {
                    let _alone = self.alone(home.id()).await;
                    sweep::sweep(self, &home).await.map(|()| Termination::Confirmed)
                }
            };
            outcomes.insert(instance.clone(), outcome);
        }
        outcomes
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        let home = self.home(instance)?;
        home.console().map_err(|error| {
            ProviderError::transient(format!("read the console of {}", home.cell()), error)
        })
    }

    async fn check(&self) -> Result<(), ProviderError> {
        let missing = |what: &Path| {
            let doing = format!("find the program {}", what.display());
            ProviderError::without_cause(ErrorClass::Invalid, doing)
        };
        for program in
            [&self.program, &self.settings.containerd, &self.settings.runc, Path::new("ip")]
        {
            if !is_program(program) {
                return Err(missing(program));
            }
        }
        cgroup::hierarchies()
            .map_err(|error| ProviderError::transient("read the cgroup hierarchies", error))?;
        self.networks.check()
    }
}

/// Returns the only offering: this node.
fn offering() -> Offering {
    Offering {
        instance_type: "netns".to_owned(),
        zone: "node".to_owned(),
        market: Market::OnDemand,
    }
}

/// Returns the instance of a cell. A record of its own is not needed: its id is the cell's.
fn instance_of(cell: &CellId, state: InstanceState) -> Instance {
    Instance::new(InstanceId(cell.as_str().to_owned()), cell.clone(), offering(), state)
}

fn not_found(doing: &str, home: &Home) -> ProviderError {
    let doing = format!("{doing} {}: there is no such instance", home.cell());
    ProviderError::without_cause(ErrorClass::NotFound, doing)
}

/// Returns the path of the cells' program: beside the daemon's, otherwise the packaged path.
fn found_program() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .map(|path| path.with_file_name(CELL_NAME))
        .filter(|path| path.is_file());
    beside.unwrap_or_else(|| CELL_BINARY.into())
}

/// Returns true if a path, or a name on PATH, is an executable.
fn is_program(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.is_file();
    }
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}
