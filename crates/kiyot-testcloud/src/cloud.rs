//! A running cloud.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio::{
    net::{TcpListener, UdpSocket},
    runtime,
    sync::{oneshot, watch},
    task::JoinSet,
};

use crate::{
    calls::Call,
    catalogue,
    client::{self, Reply},
    daemon::GATEWAY_PORT,
    dhcp,
    faults::Faults,
    instance::{Instance, State},
    machine::{self, Disk},
    metadata,
    moto::Moto,
    proxy,
    query::Query,
    role::RoleKey,
    shared::{ImageFile, Mutable, Shared},
    volume::{ImageVolume, Volume},
    vpc::{CIDR, METADATA_ADDRESS, Vpc},
};

/// Zones of the default subnets.
const ZONES: [&str; 3] = ["us-east-1a", "us-east-1b", "us-east-1c"];

/// Device of the image's root volume: moto shows this device, whatever the image was registered
/// with.
const ROOT_DEVICE: &str = "/dev/sda1";

/// Port of the metadata service.
const METADATA_PORT: u16 = 80;

/// Time within which the tasks of a cloud must end.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A subnet of the VPC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subnet {
    /// Subnet id.
    pub id: String,
    /// Availability zone.
    pub zone: String,
    /// Block of addresses, such as `10.77.0.0/20`.
    pub cidr: String,
}

/// Resources of each cloud.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// VPC id.
    pub vpc: String,
    /// A subnet in each of three zones.
    pub subnets: Vec<Subnet>,
    /// Id of the security group of cells, which admits the node.
    pub security_group: String,
    /// Id of the node's security group, which admits cells to the gateway's port.
    pub node_group: String,
    /// Image id; its owner is `self`, its name `kiyot-cell-test`.
    pub image: String,
}

/// The test's host as an instance of the VPC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Instance id.
    pub id: String,
    /// Private address.
    pub address: String,
    /// Subnet id.
    pub subnet: String,
    /// Id of its network interface.
    pub interface: String,
}

/// EC2 on this machine. Dropping it ends all its processes.
#[derive(Debug)]
pub struct Cloud {
    shared: Arc<Shared>,
    address: SocketAddr,
    setup: Setup,
    host: Option<Host>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Cloud {
    /// Starts a cloud whose instances are only descriptions.
    ///
    /// # Panics
    /// If moto does not start.
    pub async fn start() -> Self {
        Self::start_with(false).await
    }

    /// Starts a cloud whose instances are namespaces that run their user-data. This host joins its
    /// VPC. A second call waits until the first cloud is dropped.
    ///
    /// # Panics
    /// Without root or own namespaces, or if moto does not start.
    pub async fn start_with_instances() -> Self {
        assert!(
            std::env::var_os("OWN_NAMESPACES").is_some(),
            "this needs root and its own namespaces: run it by `cargo test`, whose runner is \
             scripts/runner"
        );
        Self::start_with(true).await
    }

    async fn start_with(boots: bool) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("testcloud")
            .tempdir()
            .expect("a temporary directory can be made");
        let path = directory.path().to_owned();
        let (ready, started) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime can be made");
            runtime.block_on(run(&path, boots, ready, stopped));
            runtime.shutdown_timeout(STOP_TIMEOUT);
        });
        let Ok(Started { shared, address, setup, host }) = started.await else {
            panic!("the test cloud does not start: its thread panicked");
        };
        Self {
            shared,
            address,
            setup,
            host,
            stop: Some(stop),
            thread: Some(thread),
            _directory: directory,
        }
    }

    /// Returns the word that is in the names of the cloud's processes and mounts.
    pub fn name(&self) -> String {
        let name = self.shared.directory.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Returns the URL of the API.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the address of the API.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the ids of the resources that exist from the start.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Returns this host as an instance; `None` without instances.
    pub fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// Sets the key that the metadata service issues to the host from now on. `None` removes the
    /// host's instance profile.
    pub fn set_role_key(&self, key: Option<RoleKey>) {
        self.shared.lock().role.key = key;
    }

    /// Returns the console output of an instance, without the API's delay.
    pub fn console(&self, id: &str) -> String {
        String::from_utf8_lossy(&self.shared.console_tail(id)).into_owned()
    }

    /// Returns the handle that sets faults.
    pub fn faults(&self) -> Faults {
        Faults(Arc::clone(&self.shared))
    }

    /// Calls the API.
    pub async fn call(&self, action: &str, parameters: &[(&str, &str)]) -> Result<Reply, String> {
        client::call(self.address, &Query::new(action, parameters)).await
    }

    /// Returns the recorded calls in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock().calls()
    }

    /// Returns the recorded calls of an action.
    pub fn calls_of(&self, action: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.action == action).collect()
    }

    /// Drops the recorded calls.
    pub fn clear_calls(&self) {
        self.shared.lock().clear_calls();
    }

    /// Returns all instances in order of their ids, including instances that the API doesn't show
    /// yet.
    pub fn instances(&self) -> Vec<Instance> {
        let mut state = self.shared.lock();
        let ids: Vec<_> = state.instances.keys().cloned().collect();
        ids.iter().filter_map(|id| state.instance(id).cloned()).collect()
    }

    /// Returns an instance by its id.
    pub fn instance(&self, id: &str) -> Option<Instance> {
        self.shared.lock().instance(id).cloned()
    }

    /// Shows an instance at once, and ends its transitional state (`pending`, `shutting-down`).
    pub fn settle(&self, id: &str) {
        if let Some(instance) = self.shared.lock().instance(id) {
            let now = Instant::now();
            (instance.visible, instance.settles) = (Some(now), Some(now));
        }
    }

    /// Ends an instance without a call, as EC2 does when it reclaims spot capacity.
    ///
    /// # Panics
    /// If moto can't terminate it.
    pub async fn interrupt(&self, id: &str) {
        self.end(id, "Server.SpotInstanceTermination", "Spot instance interrupted").await;
    }

    /// Ends an instance without a call, with the code and the message of the reason, as EC2 does
    /// when a launch fails after its reply.
    ///
    /// # Panics
    /// If moto can't terminate it.
    pub async fn end(&self, id: &str, code: &str, message: &str) {
        let ended = proxy::power::end(id, code, message, &self.shared).await;
        ended.expect("moto terminates an instance once");
    }

    /// Sets the block devices of the image. The first is the root device.
    pub fn set_image_volumes(&self, volumes: Vec<ImageVolume>) {
        self.shared.lock().image_volumes = volumes;
    }

    /// Returns the existing volumes, in order of their instances.
    pub fn volumes(&self) -> Vec<Volume> {
        let left = self.instances().into_iter().flat_map(|instance| {
            let is_ended = instance.state == State::Terminated;
            let volumes = instance.volumes.into_iter();
            volumes.filter(move |volume| !is_ended || !volume.ends_with_instance)
        });
        left.collect()
    }

    /// Adds a file to the image of instances that are launched from now on.
    pub fn add_to_images(&self, path: &str, content: &[u8], mode: u32) {
        let file = ImageFile { path: path.to_owned(), content: content.to_owned(), mode };
        self.shared.lock().image_files.push(file);
    }

    /// Makes instances that are launched from now on virtual machines that boot a disk. They don't
    /// get the files of [`Cloud::add_to_images`]. A stopped machine starts with its disk as at the
    /// launch.
    pub fn boot_from(&self, disk: Disk) {
        self.shared.lock().disk = Some(disk);
    }

    /// Replaces the console output of an instance.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn set_console(&self, id: &str, output: &[u8]) {
        fs::write(self.shared.console(id), output).expect("a console can be written");
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the image's root volume.
fn root_volume() -> ImageVolume {
    ImageVolume { device: ROOT_DEVICE.to_owned(), gib: 8, ends_with_instance: true }
}

/// Results of a cloud's start.
#[derive(Debug)]
struct Started {
    shared: Arc<Shared>,
    address: SocketAddr,
    setup: Setup,
    host: Option<Host>,
}

/// Runs moto, the proxy and the instances until the handle of the cloud is dropped.
async fn run(
    directory: &Path,
    boots: bool,
    ready: oneshot::Sender<Started>,
    stopped: oneshot::Receiver<()>,
) {
    let moto = Moto::start().await;
    let setup = set_up(&moto).await.expect("moto accepts the default resources");
    let shared = Arc::new(Shared {
        moto,
        directory: directory.to_owned(),
        types: catalogue::read(),
        boots,
        state: Mutable::default().into(),
        changed: tokio::sync::Notify::new(),
        launching: tokio::sync::Mutex::new(()),
        terminating: tokio::sync::Mutex::new(()),
        network: std::sync::OnceLock::new(),
    });
    shared.lock().image_volumes.push(root_volume());
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("the loopback link has ports");
    let address = listener.local_addr().expect("a bound socket has an address");
    let (close, closing) = watch::channel(false);
    let (mut tasks, mut machines) = (JoinSet::new(), JoinSet::new());
    tasks.spawn(proxy::serve(listener, Arc::clone(&shared)));
    let mut host = None;
    if boots {
        let vpc = Vpc::make(&setup.subnets, directory.join("roots")).await;
        let vpc = Arc::new(vpc.expect("bridges can be made"));
        let _ = shared.network.set(Arc::downgrade(&vpc));
        vpc.read(&shared).await.expect("rules of the VPC can be applied");
        let metadata =
            vpc.socket(|| std::net::TcpListener::bind((METADATA_ADDRESS, METADATA_PORT)));
        let metadata = metadata.expect("the metadata service's address is free");
        metadata.set_nonblocking(true).expect("a socket can be non-blocking");
        let metadata = TcpListener::from_std(metadata).expect("a socket can be used by tokio");
        tasks.spawn(metadata::serve(metadata, Arc::clone(&shared)));
        for subnet in vpc.subnets() {
            let bridge = subnet.bridge.clone();
            let socket = vpc.socket(move || dhcp::listen(&bridge));
            let socket = socket.and_then(UdpSocket::from_std);
            let socket = socket.expect("a socket can be bound to a bridge");
            tasks.spawn(dhcp::serve(socket, subnet.clone(), Arc::clone(&shared)));
        }
        host = Some(add_host(&setup, &shared, &vpc).await.expect("this host joins the VPC"));
        machines.spawn(machine::run(Arc::clone(&shared), vpc, closing));
    }
    if ready.send(Started { shared, address, setup, host }).is_ok() {
        let _ = stopped.await;
    }
    // The tasks end their instances before the VPC is removed.
    let _ = close.send(true);
    while machines.join_next().await.is_some() {}
    tasks.shutdown().await;
}

/// Makes an instance of this host, and gives the host the instance's address.
async fn add_host(setup: &Setup, shared: &Shared, vpc: &Vpc) -> Result<Host, String> {
    let subnet = setup.subnets.first().ok_or("no subnet")?;
    let launch = Query::new(
        "RunInstances",
        &[
            ("ImageId", setup.image.as_str()),
            ("InstanceType", "t3.large"),
            ("MinCount", "1"),
            ("MaxCount", "1"),
            ("SubnetId", &subnet.id),
            ("SecurityGroupId.1", &setup.node_group),
        ],
    );
    let root = shared.moto(&launch, None).await?.root();
    let item = root.items("instancesSet").first().ok_or("RunInstances: no instance")?;
    let mut instance = proxy::launch::launched(&launch, item, subnet, shared);
    instance.held = false;
    let interface = item.all("networkInterfaceId").first().map(|id| id.text.clone());
    let host = Host {
        id: instance.id.clone(),
        address: instance.address.clone(),
        subnet: subnet.id.clone(),
        interface: interface.ok_or("RunInstances: no interface")?,
    };
    vpc.plug_host(&instance)?;
    let mut state = shared.lock();
    state.host = Some(host.id.clone());
    state.instances.insert(instance.id.clone(), instance);
    Ok(host)
}

/// Makes the default resources in moto.
async fn set_up(moto: &Moto) -> Result<Setup, String> {
    let make = async |action: &str, parameters: &[(&str, &str)], field: &str| {
        let reply = moto.call(&Query::new(action, parameters), None).await?;
        let root = reply.root();
        let made = root.all(field).first().map(|found| found.text.clone());
        made.ok_or_else(|| format!("{action}: {}", reply.body))
    };
    let vpc = make("CreateVpc", &[("CidrBlock", CIDR)], "vpcId").await?;
    let mut subnets = Vec::new();
    for (index, zone) in ZONES.iter().enumerate() {
        let cidr = format!("10.77.{}.0/20", index * 16);
        let parameters =
            [("VpcId", vpc.as_str()), ("CidrBlock", &cidr), ("AvailabilityZone", zone)];
        let id = make("CreateSubnet", &parameters, "subnetId").await?;
        subnets.push(Subnet { id, zone: (*zone).to_owned(), cidr });
    }
    let group = async |name| {
        let group = [("GroupName", name), ("GroupDescription", name), ("VpcId", vpc.as_str())];
        make("CreateSecurityGroup", &group, "groupId").await
    };
    let (security_group, node_group) = (group("cells").await?, group("node").await?);
    let gateway = GATEWAY_PORT.to_string();
    for (to, of, protocol, port) in [
        (&security_group, &node_group, "-1", "-1"),
        (&node_group, &security_group, "tcp", gateway.as_str()),
    ] {
        let permission = [
            ("GroupId", to.as_str()),
            ("IpPermissions.1.Groups.1.GroupId", of),
            ("IpPermissions.1.IpProtocol", protocol),
            ("IpPermissions.1.FromPort", port),
            ("IpPermissions.1.ToPort", port),
        ];
        make("AuthorizeSecurityGroupIngress", &permission, "securityGroupRuleId").await?;
    }
    let image = [
        ("Name", "kiyot-cell-test"),
        ("Architecture", "x86_64"),
        ("RootDeviceName", ROOT_DEVICE),
        ("VirtualizationType", "hvm"),
    ];
    let image = make("RegisterImage", &image, "imageId").await?;
    Ok(Setup { vpc, subnets, security_group, node_group, image })
}
