//! A running cloud.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{net::TcpListener, runtime, sync::oneshot};

use crate::{
    calls::Call,
    catalogue,
    client::{self, Reply},
    faults::Faults,
    instance::Instance,
    moto::Moto,
    proxy,
    query::Query,
    shared::{Mutable, Shared},
};

/// Zones of the default subnets.
const ZONES: [&str; 3] = ["us-east-1a", "us-east-1b", "us-east-1c"];

/// Time that tasks of a cloud get to end.
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

/// Resources that every cloud has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// VPC id.
    pub vpc: String,
    /// A subnet in each of three zones.
    pub subnets: Vec<Subnet>,
    /// Security group id.
    pub security_group: String,
    /// Image id; its owner is `self`, its name `kiyot-cell-test`.
    pub image: String,
}

/// EC2 on this machine. Dropping it ends all its processes.
#[derive(Debug)]
pub struct Cloud {
    shared: Arc<Shared>,
    address: SocketAddr,
    setup: Setup,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Cloud {
    /// Starts a cloud whose instances are descriptions alone.
    ///
    /// # Panics
    /// If moto does not start.
    pub async fn start() -> Self {
        let directory = tempfile::Builder::new()
            .prefix("testcloud")
            .tempdir()
            .expect("a temporary directory can be made");
        let path = directory.path().to_owned();
        let (ready, started) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        // moto ends with the thread that starts it.
        let thread = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime can be made");
            runtime.block_on(run(&path, ready, stopped));
            runtime.shutdown_timeout(STOP_TIMEOUT);
        });
        let Ok((shared, address, setup)) = started.await else {
            panic!("the test cloud does not start: its thread panicked");
        };
        Self {
            shared,
            address,
            setup,
            stop: Some(stop),
            thread: Some(thread),
            _directory: directory,
        }
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

    /// Returns the switches of faults.
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

    /// Forgets the recorded calls.
    pub fn clear_calls(&self) {
        self.shared.lock().clear_calls();
    }

    /// Returns all instances in order of their ids, also those that the API doesn't show yet.
    pub fn instances(&self) -> Vec<Instance> {
        let mut state = self.shared.lock();
        let ids: Vec<_> = state.instances.keys().cloned().collect();
        ids.iter().filter_map(|id| state.instance(id).cloned()).collect()
    }

    /// Returns an instance by its id.
    pub fn instance(&self, id: &str) -> Option<Instance> {
        self.shared.lock().instance(id).cloned()
    }

    /// Ends a passing state (`pending`, `shutting-down`) now.
    pub fn settle(&self, id: &str) {
        if let Some(instance) = self.shared.lock().instance(id) {
            instance.settles = Some(std::time::Instant::now());
        }
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

/// Runs moto and the proxy until the handle of the cloud is dropped.
async fn run(
    directory: &Path,
    ready: oneshot::Sender<(Arc<Shared>, SocketAddr, Setup)>,
    stopped: oneshot::Receiver<()>,
) {
    let moto = Moto::start(directory).await;
    let setup = set_up(moto.address).await.expect("moto accepts the default resources");
    let shared = Arc::new(Shared {
        moto: moto.address,
        directory: directory.to_owned(),
        types: catalogue::read(),
        boots: false,
        state: Mutable::default().into(),
        changed: tokio::sync::Notify::new(),
        launching: tokio::sync::Mutex::new(()),
    });
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("the loopback link has ports");
    let address = listener.local_addr().expect("a bound socket has an address");
    if ready.send((Arc::clone(&shared), address, setup)).is_err() {
        return;
    }
    tokio::select! {
        () = proxy::serve(listener, shared) => {}
        _ = stopped => {}
    }
}

/// Makes the default resources in moto.
async fn set_up(moto: SocketAddr) -> Result<Setup, String> {
    let make = async |action: &str, parameters: &[(&str, &str)], field: &str| {
        let reply = client::call(moto, &Query::new(action, parameters)).await?;
        let root = reply.root();
        let made = root.all(field).first().map(|found| found.text.clone());
        made.ok_or_else(|| format!("{action}: {}", reply.body))
    };
    let vpc = make("CreateVpc", &[("CidrBlock", "10.77.0.0/16")], "vpcId").await?;
    let mut subnets = Vec::new();
    for (index, zone) in ZONES.iter().enumerate() {
        let cidr = format!("10.77.{}.0/20", index * 16);
        let parameters =
            [("VpcId", vpc.as_str()), ("CidrBlock", &cidr), ("AvailabilityZone", zone)];
        let id = make("CreateSubnet", &parameters, "subnetId").await?;
        subnets.push(Subnet { id, zone: (*zone).to_owned(), cidr });
    }
    let group = [("GroupName", "kiyot"), ("GroupDescription", "cells"), ("VpcId", &vpc)];
    let security_group = make("CreateSecurityGroup", &group, "groupId").await?;
    let image = [
        ("Name", "kiyot-cell-test"),
        ("Architecture", "x86_64"),
        ("RootDeviceName", "/dev/xvda"),
        ("VirtualizationType", "hvm"),
    ];
    let image = make("RegisterImage", &image, "imageId").await?;
    Ok(Setup { vpc, subnets, security_group, image })
}
