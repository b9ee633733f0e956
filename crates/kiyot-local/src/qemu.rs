//! The qemu provider: cells that are virtual machines on this node.
//!
//! An instance is a process `kiyot-cell launch-vm` with its QEMU: see the crate's root. The virtual
//! machine has two devices. `network` joins the device for the pod's network with the device of the
//! cell's network namespace. The other device is for the link, which the pod can't cut.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::future::join_all;
use kiyot_config::MilpaBackend;
use kiyot_engine::{
    id::CellId,
    placement::{Catalogue, LaunchRefusal, Size},
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, InstanceState,
        LaunchSpec, Provider, ProviderError, THIS_NODE, Terminations,
    },
};
use kiyot_link::{
    bootstrap::{CellFile, GatewayAddress, LinkDevice, Machine},
    mac_address::MacAddress,
    vm_file::{Accelerator, LINK_GUEST, LINK_HOST, LINK_PORT, LINK_PREFIX, VmFile, VmNetwork},
};
use ring::digest::{SHA256, digest};
use tokio::task::spawn_blocking;

use crate::{
    Draft, Home, Instances, Launch, Limits, PauseImage, RegistryConfig, command, offering, path_of,
};

mod accelerator;
mod image;
mod memory;
mod monitor;
mod network;
mod routes;
mod users;

use accelerator::Probe;
use image::{Image, ImageError};
pub(crate) use memory::NodeMemory;
use memory::{Memory, Reserved};
use monitor::Monitors;
use users::Users;

/// The launcher of cells.
const LAUNCHER: &str = "launch-vm";
/// The instance type of records without a type, and the node's name in errors.
const NODE: &str = "node";
/// The kernel's command line. The arguments after `--` go to the first process.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 quiet cryptomgr.notests 8250.nr_uarts=1 -- machine";
/// The label of a cell's disk.
const DISK_LABEL: &str = "kiyot";
/// The programs of the cell's image.
const CONTAINERD: &str = "containerd";
/// See [`CONTAINERD`].
const RUNC: &str = "runc";
/// Bounds the processes and threads of a machine, besides its vCPUs: QEMU's threads for input and
/// output (64 for each of two event loops), the launcher's, and the programs of its network.
const PROCESSES: u64 = 192;
/// The first byte of a locally administered unicast address.
const LOCAL_MAC: u8 = 2;

/// The capabilities of qemu cells. A machine has its own kernel, users and devices. Root in it has
/// power over the agent, and the node may pause it.
pub const CAPABILITIES: Capabilities = Capabilities {
    provider: "qemu",
    own_kernel: true,
    own_users: true,
    own_devices: true,
    remote: false,
    sees_node_files: false,
    separate_link: true,
    can_be_paused: true,
    pods_control_agent: true,
    ends_with_node: true,
    ends_confirmed_within: Duration::from_secs(10),
    not_found_believed_after: Duration::ZERO,
    listing_period: Duration::from_secs(2),
    has_tags: false,
    parameters_without_effect_on_boots: &[],
};

/// The provider of cells that are virtual machines of this node.
#[derive(Debug)]
pub struct Qemu {
    instances: Arc<Instances>,
    settings: Settings,
    accelerator: Probe,
    memory: Memory,
    users: Users,
    monitors: Monitors,
    node: Arc<dyn RegistryConfig>,
}

/// The node's configuration for cells.
#[derive(Debug, Clone)]
struct Settings {
    program: PathBuf,
    image: Image,
    disk_bytes: u64,
    user: u32,
    group: u32,
    gateway: PathBuf,
    pause_image: Arc<PauseImage>,
    /// The time after which a machine without an enrolled agent powers off, because its token has
    /// expired.
    power_off_after: Duration,
}

impl Settings {
    /// Returns the users that may own a monitor's socket: the launcher's, and QEMU's in machines of
    /// earlier versions.
    fn owners(&self) -> [u32; 2] {
        [rustix::process::getuid().as_raw(), self.user]
    }
}

impl Qemu {
    /// Returns the configured provider. Has no side effects.
    pub fn new(config: &MilpaBackend, pause_image: Arc<PauseImage>) -> Self {
        let qemu = &config.qemu;
        let instances = Instances::new(config, &qemu.network, qemu.cell_binary.as_deref(), NODE);
        let settings = Settings {
            program: qemu.program.clone(),
            image: Image::new(&qemu.image_dir),
            disk_bytes: qemu.disk_size,
            user: qemu.user,
            group: qemu.group,
            gateway: config.state_dir.join("gateway.sock"),
            pause_image,
            power_off_after: config.token_ttl,
        };
        let probe_dir = config.state_dir.join("probe");
        Self {
            accelerator: Probe::new(qemu.accel, instances.program.clone(), probe_dir),
            instances: Arc::new(instances),
            settings,
            memory: Memory::default(),
            users: Users::new(qemu.first_user),
            monitors: Monitors::default(),
            node: Arc::new(None::<PathBuf>),
        }
    }

    /// Sets the path of the gateway's socket, if it is not in `state_dir`.
    pub fn with_gateway(mut self, socket: PathBuf) -> Self {
        self.settings.gateway = socket;
        self
    }

    /// Sets the source of the node's settings. Without it, machines have containerd's defaults.
    pub fn with_node(mut self, node: Arc<dyn RegistryConfig>) -> Self {
        self.node = node;
        self
    }

    /// Returns the description of a machine without disks and network.
    fn bare(&self) -> Result<VmFile, ProviderError> {
        let Settings { program, image, user, group, .. } = &self.settings;
        Ok(VmFile {
            program: path_of(program).ok_or_else(|| missing("program", program))?,
            accelerator: Accelerator::Tcg,
            kernel: image.kernel(),
            initramfs: None,
            root: None,
            disk_bytes: None,
            command_line: COMMAND_LINE.to_owned(),
            cpus: 1,
            memory_mib: accelerator::MEMORY_MIB,
            user: *user,
            group: *group,
            network: None,
        })
    }

    /// Writes the files of a machine, and makes its disk.
    async fn write(
        &self,
        home: &Home,
        spec: &LaunchSpec,
        machine: VmFile,
    ) -> Result<(), ProviderError> {
        let [pod_mac, link_mac] = mac_addresses(home.cell());
        let link =
            LinkDevice { mac: link_mac, address: LINK_GUEST.into(), prefix_len: LINK_PREFIX };
        let mut bootstrap = spec.bootstrap.clone();
        bootstrap.gateway = GatewayAddress::Tcp(SocketAddr::from((LINK_HOST, LINK_PORT)));
        // Awaited first: the node's runtime may name the pause image in the same response.
        let cri = self.node.cri_settings().await;
        let cell_file = CellFile {
            bootstrap,
            containerd: CONTAINERD.into(),
            runc: RUNC.into(),
            pause_image: self.settings.pause_image.current(),
            registry_config_dir: None,
            restrict_oom_score_adj: false,
            cri,
            machine: Some(Machine {
                pod_mac: Some(pod_mac),
                link: Some(link),
                power_off_after_secs: self.settings.power_off_after.as_secs(),
                closed_addresses: Vec::new(),
                node_networks: Vec::new(),
            }),
        };
        let machine = VmFile {
            network: Some(VmNetwork { pod_mac, link_mac, gateway: self.settings.gateway.clone() }),
            initramfs: Some(self.settings.image.initramfs()),
            root: Some(self.settings.image.root()),
            disk_bytes: Some(self.settings.disk_bytes),
            ..machine
        };
        let doing = || format!("make the instance of {}", home.cell());
        cell_file
            .write(&home.cell_file())
            .map_err(|error| ProviderError::transient(doing(), error))?;
        machine
            .write(&home.file("vm.json"))
            .map_err(|error| ProviderError::transient(doing(), error))?;
        users::make_disk(home, self.settings.disk_bytes, machine.user, machine.group)
            .map_err(|error| ProviderError::transient(doing(), error))?;
        make_file_system(home).await
    }

    /// Reserves memory, writes the files and starts the machine.
    async fn make(
        &self,
        draft: Draft,
        spec: &LaunchSpec,
        size: Size,
    ) -> Result<Instance, ProviderError> {
        match self.prepare(draft.home(), spec, size).await {
            Ok((_reserved, limits)) => {
                self.instances.start(draft, LAUNCHER, &size.to_string(), Some(limits)).await
            }
            Err(error) => {
                // No process runs whose end would remove the directory.
                if let Err(error) = self.instances.discard(draft).await {
                    tracing::warn!(cell = %spec.cell, %error, "refused launch not removed");
                }
                Err(error)
            }
        }
    }

    /// Prepares everything that a machine starts from. Returns its reserved memory and the limits
    /// of its processes.
    async fn prepare(
        &self,
        home: &Home,
        spec: &LaunchSpec,
        size: Size,
    ) -> Result<(Reserved, Limits), ProviderError> {
        self.check_image().await?;
        let bare = self.bare()?;
        let accelerator = self.accelerator.wait(&bare).await?;
        let machine = VmFile { accelerator, cpus: size.cpus, memory_mib: size.memory_mib, ..bare };
        let needed = memory::needed_mib(&machine);
        let limits = Limits {
            memory_bytes: memory::limit_bytes(&machine),
            pids: PROCESSES + u64::from(size.cpus),
        };
        let (instances, cell) = (Arc::clone(&self.instances), spec.cell.clone());
        let (memory, users) = (self.memory.clone(), self.users.clone());
        let reserved = spawn_blocking(move || {
            let user = users.reserve(&instances, &cell)?;
            Ok::<_, ProviderError>((memory.reserve(&instances, &cell, needed)?, user))
        })
        .await
        .map_err(|error| ProviderError::transient("look at the node's memory", error))?;
        let (reserved, user) = reserved.map_err(|mut error: ProviderError| {
            if error.class == ErrorClass::Capacity {
                let refused = vec![offering(&size.to_string())];
                error.refusal = Some(LaunchRefusal::Offerings(refused));
            }
            error
        })?;
        self.write(home, spec, VmFile { user: user.user, ..machine }).await?;
        Ok((reserved, limits))
    }

    /// Returns an instance with the state that its machine reports.
    async fn judge(&self, instance: Instance) -> Instance {
        let home = self.instances.dir(&instance.cell);
        self.monitors.judge(instance, &home, &self.settings.owners()).await
    }

    /// Compares the image with its list.
    async fn check_image(&self) -> Result<(), ProviderError> {
        let image = self.settings.image.clone();
        let failed = |error: ImageError| {
            let class =
                if error.is_transient() { ErrorClass::Transient } else { ErrorClass::Invalid };
            ProviderError::new(class, "check the image of cells", error)
        };
        spawn_blocking(move || image.check())
            .await
            .map_err(|error| ProviderError::transient("check the image of cells", error))?
            .map_err(failed)
    }
}

#[async_trait]
impl Provider for Qemu {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn place(&self) -> Option<String> {
        Some(THIS_NODE.to_owned())
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        let node = NodeMemory::read()
            .map_err(|error| ProviderError::transient("look at the node's memory", error))?;
        let cpus = std::thread::available_parallelism()
            .map_err(|error| ProviderError::transient("count the node's CPUs", error))?;
        let cpus = u32::try_from(cpus.get()).unwrap_or(u32::MAX);
        let largest = Size::within(cpus, node.total_mib);
        let zone = offering(NODE).zone;
        // An image of another architecture is refused at launch.
        Ok(Catalogue::sized(NODE, &zone, largest, image::ARCHITECTURE))
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let candidate = spec.offerings().next().map(|offering| offering.instance_type.as_str());
        let size = candidate.and_then(Size::parse).ok_or_else(|| {
            let name = candidate.unwrap_or_default();
            let doing = format!(
                "instance type {name:?}: is not a size; allowed: a size such as \"2cpu-704mib\""
            );
            ProviderError::without_cause(ErrorClass::Invalid, doing)
        })?;
        match self.instances.begin(spec, token).await? {
            Launch::Running(instance) => Ok(instance),
            Launch::New(draft) => self.make(draft, spec, size).await,
        }
    }

    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        // The containers' cgroups are in the guest, not on the node.
        let without = Attachment { cgroup_parent: String::new(), ..to.clone() };
        let (alone, addresses) = self.instances.attach(instance, &without).await?;
        self.instances.inherit_weight(&alone, &to.cgroup_parent).await;
        let network = network::join(alone.home(), &addresses).await?;
        Ok(Attached { addresses, network: Some(network) })
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        // The engine awaits the termination, which releases everything.
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let listed = self.instances.list().await?;
        let listed = join_all(listed.into_iter().map(|instance| self.judge(instance))).await;
        self.monitors.retain(&listed);
        Ok(listed)
    }

    async fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        Ok(self.judge(self.instances.describe(id)?).await)
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        self.instances.terminate(instances).await
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        let mut console = self.instances.console(instance)?;
        if let Ok(cell) = CellId::parse(&instance.0)
            && let Some(status) =
                monitor::halted(&self.instances.dir(&cell), &self.settings.owners()).await
        {
            console += &format!("\nkiyot: QEMU reports the machine as {status}\n");
        }
        Ok(console)
    }

    async fn check(&self) -> Result<(), ProviderError> {
        let program = &self.settings.program;
        let programs = ["tc", "mkfs.ext4", "iptables-restore"].map(Path::new);
        self.instances.check(&[&[program.as_path()], &programs[..]].concat())?;
        self.check_image().await?;
        if !Path::new(network::TUN).exists() {
            return Err(missing("device", Path::new(network::TUN)));
        }
        // The first launch uses the result.
        self.accelerator.begin(&self.bare()?);
        Ok(())
    }
}

fn missing(what: &str, path: &Path) -> ProviderError {
    let doing = format!("find the {what} {}", path.display());
    ProviderError::without_cause(ErrorClass::Invalid, doing)
}

/// Returns the hardware addresses of a cell's devices, the pod's first.
fn mac_addresses(cell: &str) -> [MacAddress; 2] {
    let hash = digest(&SHA256, cell.as_bytes());
    let mut bytes = hash.as_ref().iter().copied();
    [(); 2].map(|()| {
        let mut address = [LOCAL_MAC; 6];
        address[1..].iter_mut().zip(&mut bytes).for_each(|(to, byte)| *to = byte);
        MacAddress(address)
    })
}

/// Makes the empty file system of a cell's disk. It has no journal, because the cell does not
/// outlive its node.
async fn make_file_system(home: &Home) -> Result<(), ProviderError> {
    let path = home.file(users::DISK).display().to_string();
    let options = ["-q", "-F", "-L", DISK_LABEL, "-O", "^has_journal", "-m", "0"];
    let extended = ["-E", "lazy_itable_init=1,nodiscard", "--", &path];
    let arguments = [&options[..], &extended[..]].concat();
    command::succeed("mkfs.ext4", &arguments, Some(home.dir())).await.map_err(|error| {
        ProviderError::transient(format!("make the disk of {}", home.cell()), error)
    })
}

#[cfg(test)]
mod tests {
    use kiyot_link::bootstrap::Bootstrap;

    use super::*;
    use kiyot_engine::{
        placement::{Candidate, Needs, NoFit, Rules, rank},
        request::Architecture,
    };

    #[test]
    fn mac_addresses_are_local_and_differ() {
        let [pod, link] = mac_addresses("cell-aaaaaaaaaaaa");
        assert_eq!((pod.0[0], link.0[0]), (2, 2));
        assert_ne!(pod, link);
        assert_ne!(mac_addresses("cell-aaaaaaaaaaab"), [pod, link]);
    }

    #[tokio::test]
    async fn offering_without_a_size_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config = MilpaBackend { state_dir: dir.path().into(), ..MilpaBackend::default() };
        let spec = LaunchSpec {
            cell: CellId::mint().unwrap(),
            candidates: vec![Candidate::free(offering("t3.micro"))],
            tags: Default::default(),
            bootstrap: Bootstrap {
                cell: String::new(),
                gateway: GatewayAddress::Unix("/nowhere".into()),
                ca_sha256: String::new(),
                token: String::new(),
                orphan_timeout_secs: 1,
                agent: None,
            },
            parameters: Default::default(),
        };
        let error =
            Qemu::new(&config, PauseImage::new(None)).launch(&spec, "token").await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Invalid);
        assert!(error.doing.contains("t3.micro"), "{error}");
    }

    #[tokio::test]
    async fn catalogue_has_the_node_as_its_largest_size_and_the_images_architecture() {
        let dir = tempfile::tempdir().unwrap();
        let config = MilpaBackend { state_dir: dir.path().into(), ..MilpaBackend::default() };
        let catalogue = Qemu::new(&config, PauseImage::new(None)).catalogue().await.unwrap();
        let [node] = catalogue.entries() else { panic!("{catalogue:?}") };
        assert!(catalogue.is_sized() && node.instance_type.milli_cpus >= 1000);
        let needs = |architecture| Needs { architecture, ..Needs::default() };
        let rules = Rules::default();
        assert!(!rank(&catalogue, &needs(Architecture::Amd64), &rules, &()).is_empty());
        let needs = needs(Architecture::Arm64);
        assert_eq!(rank(&catalogue, &needs, &rules, &()), []);
        let refused = NoFit::new(&catalogue, &needs, &rules).to_string();
        assert!(
            refused.contains("cells have an image for amd64, and arm64 is needed"),
            "{refused}"
        );
    }
}
