//! Instances on this node, for the providers `netns` and `qemu`.
//!
//! A local instance is a launcher process with its descendants, in a cgroup and a network namespace
//! of the cell. Its id is the cell's id. The instance's directory has all records of it: see
//! `instance`. A provider adds the files that its launcher reads, and the steps that follow the
//! attachment of the pod's network.

use std::{
    collections::HashMap,
    io::{self, PipeWriter, Write},
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use kiyot_config::{LocalNetwork, MilpaBackend};
use kiyot_engine::{
    id::CellId,
    placement::{Market, Offering},
    provider::{
        Attachment, ErrorClass, Instance, InstanceId, InstanceState, LaunchSpec, ProviderError,
        Termination, Terminations,
    },
};
use kiyot_link::bootstrap::GO;
use ring::digest::{SHA256, digest};
use tokio::{
    process::Command,
    sync::{Mutex as AsyncMutex, OwnedMutexGuard},
    task::spawn_blocking,
};

pub(crate) mod cgroup;
pub(crate) mod command;
pub(crate) mod inotify_limit;
mod instance;
mod limits;
mod listing;
mod machine;
pub mod netns;
mod network;
mod pause_image;
pub mod pod_cgroup;
mod process;
pub mod qemu;
mod registry_config;
mod removal;
mod resolv_conf;
mod shortage;
pub(crate) mod slice;
mod sweep;

pub(crate) use instance::Home;
pub(crate) use limits::Limits;
pub use machine::machine_for_cells;
pub(crate) use network::DEVICE;
#[cfg(debug_assertions)]
pub use network::cni::fuzzing;
pub use network::remote::Forwarding;

pub use pause_image::PauseImage;
pub use registry_config::RegistryConfig;

use instance::InstanceRecord;
use listing::{Listed, Listing};
use network::{Networks, bridge::Bridge, namespace};
use process::Identity;
use removal::Removal;

/// The packaged path of the cells' program, used if no such file is beside the daemon's program.
const CELL_BINARY: &str = "/usr/libexec/kiyot/kiyot-cell";
const CELL_NAME: &str = "kiyot-cell";
/// The zone of all local offerings.
const ZONE: &str = "node";

/// The instances of a local provider.
#[derive(Debug)]
pub(crate) struct Instances {
    /// The parent of the instances' directories.
    cells: PathBuf,
    /// The cells' program, whose subcommands are the launchers.
    pub(crate) program: PathBuf,
    /// The default type, for records that name no instance type.
    default_type: &'static str,
    networks: Networks,
    listing: Arc<Listing>,
    removal: Removal,
    /// Serialises the calls for each instance.
    busy: Mutex<HashMap<CellId, Arc<AsyncMutex<()>>>>,
}

/// Exclusive use of an instance.
#[derive(Debug)]
pub(crate) struct Alone {
    home: Home,
    _guard: OwnedMutexGuard<()>,
}

/// A launch that has a directory, in which the provider writes its files.
#[derive(Debug)]
pub(crate) struct Draft {
    alone: Alone,
    token_sha256: String,
}

/// The state of a launch.
#[derive(Debug)]
pub(crate) enum Launch {
    /// An instance with the launch's token runs.
    Running(Instance),
    /// The provider makes the instance from this draft.
    New(Draft),
}

/// Returns the node's boot id, which changes at each boot; empty if the kernel has no boot id. The
/// file is read once, because later the daemon may have no free file descriptor.
pub fn boot_id() -> String {
    static READ: OnceLock<String> = OnceLock::new();
    READ.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|id| id.trim().to_owned())
            .unwrap_or_default()
    })
    .clone()
}

impl Alone {
    pub(crate) fn home(&self) -> &Home {
        &self.home
    }
}

impl Draft {
    pub(crate) fn home(&self) -> &Home {
        &self.alone.home
    }
}

impl Instances {
    /// Returns the instances below the configured state directory. Has no side effects.
    pub(crate) fn new(
        config: &MilpaBackend,
        network: &LocalNetwork,
        program: Option<&Path>,
        default_type: &'static str,
    ) -> Self {
        // The configuration allows IPv4 networks only.
        let subnet = if let IpAddr::V4(address) = network.subnet.address {
            address
        } else {
            Ipv4Addr::new(10, 200, 0, 0)
        };
        Self {
            cells: config.state_dir.join("cells"),
            program: program.map_or_else(found_program, Path::to_owned),
            default_type,
            networks: Networks {
                cni_conf_dir: network.cni_conf_dir.clone(),
                cni_bin_dirs: network.cni_bin_dirs.clone(),
                bridge: Bridge {
                    device: network.bridge.clone(),
                    network: subnet,
                    prefix: network.subnet.prefix,
                    addresses: config.state_dir.join("addresses"),
                },
                bridge_lock: AsyncMutex::default(),
                ports_lock: AsyncMutex::default(),
            },
            listing: Arc::default(),
            removal: Removal::new(config.state_dir.join("removed")),
            busy: Mutex::default(),
        }
    }

    /// Returns the directory of an instance. An id of another provider is an error, not a proof of
    /// absence.
    fn home(&self, instance: &InstanceId) -> Result<Home, ProviderError> {
        let cell = CellId::parse(&instance.0).map_err(|error| {
            let doing = format!("look up instance {instance}, which is not on this node");
            ProviderError::new(ErrorClass::Invalid, doing, error)
        })?;
        Ok(Home::new(&self.cells, &cell))
    }

    /// Returns the path of the directory of a cell's instance.
    pub(crate) fn dir(&self, cell: &CellId) -> PathBuf {
        Home::new(&self.cells, cell).dir().to_owned()
    }

    /// Returns the directories of all instances. Blocking.
    pub(crate) fn homes(&self) -> io::Result<Vec<Home>> {
        Home::all(&self.cells).map(|(homes, _)| homes)
    }

    /// Waits until no other call uses an instance.
    async fn alone(&self, home: Home) -> Alone {
        let lock = {
            let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            busy.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(busy.entry(home.id().clone()).or_default())
        };
        Alone { home, _guard: lock.lock_owned().await }
    }

    /// Begins a launch: removes the remains of an unfinished launch or of a launch with another
    /// token, and creates the directory.
    pub(crate) async fn begin(
        &self,
        spec: &LaunchSpec,
        token: &str,
    ) -> Result<Launch, ProviderError> {
        let alone = self.alone(Home::new(&self.cells, &spec.cell)).await;
        let home = alone.home();
        let token_sha256 = hex::encode(digest(&SHA256, token.as_bytes()));
        let looked = home.known().and_then(|known| Ok((known.launcher().runs(&spec.cell)?, known)));
        let (running, known) = looked.map_err(|error| {
            ProviderError::transient(format!("look at the instance of {}", home.cell()), error)
        })?;
        if running && known.token_sha256 == token_sha256 {
            let instance = self.instance_of(home, &known.instance_type, InstanceState::Running);
            return Ok(Launch::Running(instance));
        }
        sweep::sweep(self, home).await?;
        home.make()
            .and_then(|()| self.removal.prepare())
            .map_err(|error| ProviderError::transient(making(home), error))?;
        Ok(Launch::New(Draft { alone, token_sha256 }))
    }

    /// Removes the files of a refused launch.
    pub(crate) async fn discard(&self, draft: Draft) -> Result<(), ProviderError> {
        sweep::sweep(self, draft.home()).await
    }

    /// Creates the instance of a launch: its cgroup with its limits, its network namespace, and its
    /// launcher, a subcommand of the cells' program.
    pub(crate) async fn start(
        &self,
        draft: Draft,
        launcher: &str,
        instance_type: &str,
        limits: Option<Limits>,
    ) -> Result<Instance, ProviderError> {
        let home = draft.home();
        let limited = || {
            let hierarchies = cgroup::hierarchies()?;
            cgroup::make(&hierarchies, home.cell())?;
            limits.map_or(Ok(()), |limits| limits::set(&hierarchies, home.cell(), limits))
        };
        limited().map_err(|error| ProviderError::transient(making(home), error))?;
        namespace::make(&home.netns_path())
            .await
            .map_err(|error| ProviderError::transient(making(home), error))?;
        let (launcher, go) = self.spawn(home, launcher)?;
        let instance_type = if instance_type == self.default_type {
            String::new()
        } else {
            instance_type.to_owned()
        };
        let instance = self.instance_of(home, &instance_type, InstanceState::Running);
        home.keep(&InstanceRecord {
            token_sha256: draft.token_sha256.clone(),
            boot_id: boot_id(),
            launcher,
            instance_type,
            ..InstanceRecord::default()
        })?;
        // The launcher waits for this, so that it has no effect before it is recorded. If the
        // launcher has exited, the list of instances shows it.
        let _ = (&go).write_all(GO);
        Ok(instance)
    }

    /// Starts a launcher, which waits for [`GO`] from the returned pipe. After [`GO`] it outlives
    /// the daemon; if the pipe closes earlier, it exits.
    fn spawn(
        &self,
        home: &Home,
        launcher: &str,
    ) -> Result<(Option<Identity>, PipeWriter), ProviderError> {
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
            .arg(launcher)
            .arg("--dir")
            .arg(home.dir())
            .arg("--netns")
            .arg(home.netns_path())
            .arg("--cgroup")
            .arg(cgroup::name(home.cell()));
        command.current_dir("/").process_group(0);
        let (gate, go) = io::pipe().map_err(failed)?;
        command.stdin(gate).stdout(console.try_clone().map_err(failed)?).stderr(console);
        // The runtime reaps the dropped child.
        let child = command.kill_on_drop(false).spawn().map_err(failed)?;
        let launcher = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .map_or(Ok(None), Identity::of)
            .map_err(failed)?;
        Ok((launcher, go))
    }

    /// Attaches an instance to a pod's network. Returns exclusive use of the instance, and its
    /// addresses.
    pub(crate) async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<(Alone, Vec<IpAddr>), ProviderError> {
        let alone = self.alone(self.home(instance)?).await;
        let home = alone.home();
        let there = home.dir().try_exists();
        if !there.map_err(|error| {
            ProviderError::transient(format!("look for the instance of {}", home.cell()), error)
        })? {
            return Err(not_found("attach", home));
        }
        let addresses = self.networks.attach(home, to).await?;
        Ok((alone, addresses))
    }

    /// Gives the processes of an instance the CPU weight that the kubelet set on the pod's cgroup.
    /// Each [`Instances::list`] copies later changes of this weight. A failure is logged; the pod
    /// runs without the weight.
    pub(crate) async fn inherit_weight(&self, alone: &Alone, cgroup_parent: &str) {
        let (home, parent) = (alone.home().clone(), cgroup_parent.to_owned());
        let inherited = spawn_blocking(move || {
            limits::inherit_weights(&cgroup::hierarchies()?, [(home.cell(), parent.as_str())])?;
            let known = home.known()?;
            if known.is_unreadable || known.weight_of == parent {
                return Ok(());
            }
            home.keep(&InstanceRecord { weight_of: parent, ..known }).map_err(io::Error::other)
        });
        if let Err(error) = inherited.await.map_err(io::Error::other).flatten() {
            let cell = alone.home().cell();
            tracing::warn!(cell, %error, "cell without the CPU weight of its pod");
        }
    }

    /// Lists all instances.
    pub(crate) async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        // The first list finds the remains of the previous daemon's instances.
        self.removal.wake();
        let (cells, listing) = (self.cells.clone(), Arc::clone(&self.listing));
        let listing =
            spawn_blocking(move || listing.list(&cells).inspect(|listed| follow_weights(listed)));
        let failed =
            |error| ProviderError::transient(format!("list {}", self.cells.display()), error);
        let listed = listing.await.map_err(io::Error::other).map_err(failed)?.map_err(failed)?;
        Ok(listed
            .into_iter()
            .map(|listed| Instance {
                pod_uid: listed.pod_uid,
                ..self.instance_of(&listed.home, &listed.instance_type, listed.state)
            })
            .collect())
    }

    /// Returns the instance types of all running instances, with the resident memory of their
    /// processes, in bytes. Blocking.
    pub(crate) fn resident(&self) -> io::Result<Vec<(CellId, String, u64)>> {
        let hierarchies = cgroup::hierarchies()?;
        let listed = self.listing.list(&self.cells)?;
        let running = listed.into_iter().filter(|listed| listed.state.is_alive());
        running
            .map(|listed| {
                let processes = cgroup::processes(&hierarchies, listed.home.cell())?;
                let resident = processes.into_iter().map(process::resident_bytes);
                let resident = resident.sum::<io::Result<u64>>()?;
                Ok((listed.home.id().clone(), listed.instance_type, resident))
            })
            .collect()
    }

    /// Returns an instance by its id.
    pub(crate) fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        let home = self.home(id)?;
        let looked_up = home.dir().try_exists().and_then(|exists| {
            if !exists {
                return Ok(None);
            }
            let known = home.known()?;
            Ok(Some((known.launcher().runs(home.id())?, known.instance_type)))
        });
        match looked_up {
            Ok(Some((runs, instance_type))) => {
                Ok(self.instance_of(&home, &instance_type, state_of(runs)))
            }
            Ok(None) => Err(not_found("describe", &home)),
            Err(error) => Err(ProviderError::transient(format!("describe {}", home.cell()), error)),
        }
    }

    /// Ends instances and removes all their resources.
    pub(crate) async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let mut outcomes = Terminations::new();
        for instance in instances {
            let outcome = match self.home(instance) {
                Err(error) => Err(error),
                Ok(home) => {
                    let alone = self.alone(home).await;
                    sweep::sweep(self, alone.home()).await.map(|()| Termination::Confirmed)
                }
            };
            outcomes.insert(instance.clone(), outcome);
        }
        outcomes
    }

    /// Returns the end of an instance's console output.
    pub(crate) fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        let home = self.home(instance)?;
        home.console().map_err(|error| {
            ProviderError::transient(format!("read the console of {}", home.cell()), error)
        })
    }

    /// Checks whether a launch can succeed with these programs and the provider's own. The error
    /// names a missing part.
    pub(crate) fn check(&self, programs: &[&Path]) -> Result<(), ProviderError> {
        for program in [&*self.program, Path::new("ip")].iter().chain(programs) {
            if path_of(program).is_none() {
                let doing = format!("find the program {}", program.display());
                return Err(ProviderError::without_cause(ErrorClass::Invalid, doing));
            }
        }
        cgroup::hierarchies()
            .map_err(|error| ProviderError::transient("read the cgroup hierarchies", error))?;
        self.networks.check()
    }

    /// Returns an instance. It needs no record, because its id is the cell's.
    fn instance_of(&self, home: &Home, instance_type: &str, state: InstanceState) -> Instance {
        let instance_type =
            if instance_type.is_empty() { self.default_type } else { instance_type };
        let (id, cell) = (InstanceId(home.cell().to_owned()), home.id().clone());
        Instance::new(id, cell, offering(instance_type), state)
    }
}

/// Copies the current CPU weights of the pods' cgroups to the instances: the kubelet resizes a pod
/// without a call to the runtime. Blocking.
fn follow_weights(listed: &[Listed]) {
    let weighed = || {
        let running = listed.iter().filter(|it| it.state.is_alive() && !it.weight_of.is_empty());
        running.map(|listed| (listed.home.cell(), listed.weight_of.as_str()))
    };
    if weighed().next().is_none() {
        return;
    }
    let followed = cgroup::hierarchies()
        .and_then(|hierarchies| limits::inherit_weights(&hierarchies, weighed()));
    if let Err(error) = followed {
        // Not a warning: each list would log it again.
        tracing::debug!(%error, "CPU weights of cells not read");
    }
}

/// Returns the offering of an instance type on this node.
pub(crate) fn offering(instance_type: &str) -> Offering {
    Offering {
        instance_type: instance_type.to_owned(),
        zone: ZONE.to_owned(),
        market: Market::OnDemand,
    }
}

fn state_of(runs: bool) -> InstanceState {
    if runs { InstanceState::Running } else { InstanceState::Stopped }
}

fn making(home: &Home) -> String {
    format!("make the instance of {}", home.cell())
}

fn not_found(doing: &str, home: &Home) -> ProviderError {
    let doing = format!("{doing} {}: no such instance", home.cell());
    ProviderError::without_cause(ErrorClass::NotFound, doing)
}

/// Returns the path of the cells' program: beside the daemon's, otherwise the packaged path.
pub fn found_program() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .map(|path| path.with_file_name(CELL_NAME))
        .filter(|path| path.is_file());
    beside.unwrap_or_else(|| CELL_BINARY.into())
}

/// Returns the path of a program, which is looked up on PATH if it is a plain name; `None` if there
/// is no such file.
pub(crate) fn path_of(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|program| program.is_file())
}
