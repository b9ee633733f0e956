//! A cell's network: the node's CNI configuration when there is one, else a bridge of the
//! provider's own.
//!
//! What is about to be made is in the instance's `network.json` before it is made, with the
//! configuration that it is made by: a later daemon takes away what this one made, even after the
//! node's configuration has changed.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    super::{Attachment, ErrorClass, HostPort, ProviderError},
    instance::{Home, Known},
    shortage::is_shortage,
};

pub(super) mod bridge;
pub(super) mod cni;
mod conntrack;
pub(super) mod namespace;
mod ports;
mod rules;

use ports::{PortError, Ports};

/// The pod's device in the cell.
pub(super) const DEVICE: &str = "eth0";

/// What an instance's `network.json` says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Plan {
    pod_name: String,
    pod_namespace: String,
    pod_uid: String,
    sandbox: String,
    way: Way,
    /// Ports of the node that lead to it.
    #[serde(default)]
    ports: Vec<HostPort>,
    /// Once the network is there: the pod's first.
    addresses: Option<Vec<IpAddr>>,
}

/// How the network is made.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Cni(Box<cni::Network>),
    Bridge(bridge::Bridge),
}

/// How networks are made here.
#[derive(Debug)]
pub(super) struct Networks {
    /// See the configuration's `netns`.
    pub(super) cni_conf_dir: PathBuf,
    pub(super) cni_bin_dirs: Vec<PathBuf>,
    pub(super) bridge: bridge::Bridge,
    /// One at a time makes the bridge or takes it away.
    pub(super) bridge_lock: tokio::sync::Mutex<()>,
    /// One at a time takes ports of the node.
    pub(super) ports_lock: tokio::sync::Mutex<()>,
}

impl Way {
    /// Whether the ports of a pod are mapped with it, by a plugin.
    fn maps_ports(&self) -> bool {
        matches!(self, Self::Cni(network) if network.maps_ports())
    }

    /// The subnets of the cell's link, once it has one.
    fn subnets(&self) -> Vec<String> {
        match self {
            Self::Cni(network) => network.subnets(),
            Self::Bridge(bridge) => vec![bridge.subnet()],
        }
    }
}

impl Plan {
    /// What an instance's directory says; `None` if it has no network and never began to get one.
    pub(super) fn read(home: &Home) -> Result<Option<Self>, ProviderError> {
        let path = home.network_file();
        match fs::read(&path) {
            Ok(content) => serde_json::from_slice(&content).map(Some).map_err(|error| {
                ProviderError::new(ErrorClass::Invalid, format!("read {}", path.display()), error)
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ProviderError::transient(format!("read {}", path.display()), error)),
        }
    }

    fn write(&self, home: &Home) -> Result<(), ProviderError> {
        home.write_json(&home.network_file(), self)
    }

    /// `metadata.uid` of the pod.
    pub(super) fn pod_uid(&self) -> &str {
        &self.pod_uid
    }

    fn pod(&self) -> cni::Pod<'_> {
        let Self { pod_name, pod_namespace, pod_uid, sandbox, ports, .. } = self;
        cni::Pod { name: pod_name, namespace: pod_namespace, uid: pod_uid, sandbox, ports }
    }

    /// The ports that we map ourselves.
    fn own_ports(&self) -> &[HostPort] {
        if self.way.maps_ports() { &[] } else { &self.ports }
    }
}

impl Networks {
    /// Says what would keep a network from being made.
    pub(super) fn check(&self) -> Result<(), ProviderError> {
        match self.configured()? {
            Some(network) => network.check(),
            None => Ok(()),
        }
    }

    fn configured(&self) -> Result<Option<cni::Network>, ProviderError> {
        cni::Network::load(&self.cni_conf_dir, &self.cni_bin_dirs).map_err(|error| {
            ProviderError::new(
                ErrorClass::Invalid,
                format!("read the CNI configuration in {}", self.cni_conf_dir.display()),
                error,
            )
        })
    }

    /// Gives an instance the pod's network. Again it returns the same; after a try that failed it
    /// begins anew.
    pub(super) async fn attach(
        &self,
        home: &Home,
        to: &Attachment,
    ) -> Result<Vec<IpAddr>, ProviderError> {
        if let Some(plan) = Plan::read(home)? {
            if let Some(addresses) = &plan.addresses {
                return Ok(addresses.clone());
            }
            self.detach(home, &plan).await?;
        }
        let known = home.known().map_err(|error| {
            ProviderError::transient(format!("look at the instance of {}", home.cell()), error)
        })?;
        home.keep(&Known { attachment: Some(to.clone()), ..known })?;
        let mut plan = self.plan(to)?;
        self.begin(home, &plan).await?;
        let doing = || format!("attach {} to the network", home.cell());
        let addresses = match &mut plan.way {
            Way::Cni(network) => {
                let (name, namespace) = (to.pod_name.as_str(), to.pod_namespace.as_str());
                let pod = cni::Pod {
                    name,
                    namespace,
                    uid: &to.pod_uid,
                    sandbox: &to.sandbox,
                    ports: &to.ports,
                };
                network
                    .add(home, &pod)
                    .await
                    .map_err(|error| ProviderError::transient(doing(), error))?
            }
            Way::Bridge(bridge) => {
                let _alone = self.bridge_lock.lock().await;
                let address = bridge
                    .attach(home)
                    .await
                    .map_err(|error| ProviderError::transient(doing(), error))?;
                vec![address.into()]
            }
        };
        Ports::new(home, plan.own_ports())
            .open(&addresses, &plan.way.subnets())
            .await
            .map_err(|error| ProviderError::transient(doing(), error))?;
        plan.addresses = Some(addresses.clone());
        plan.write(home)?;
        Ok(addresses)
    }

    /// What is to be made, as the node is configured now.
    fn plan(&self, to: &Attachment) -> Result<Plan, ProviderError> {
        let way = match self.configured()? {
            Some(network) => Way::Cni(Box::new(network)),
            None => Way::Bridge(self.bridge.clone()),
        };
        let Attachment { pod_name, pod_namespace, pod_uid, sandbox, ports, .. } = to.clone();
        Ok(Plan { pod_name, pod_namespace, pod_uid, sandbox, way, ports, addresses: None })
    }

    /// What an instance's network was made of; if that can't be read, what it would be made of now.
    /// `None` if it never began to get one.
    pub(super) fn plan_of(
        &self,
        home: &Home,
        known: &Known,
    ) -> Result<Option<Plan>, ProviderError> {
        let error = match Plan::read(home) {
            Ok(plan) => return Ok(plan),
            Err(error) if lacks_means(&error) => return Err(error),
            Err(error) => error,
        };
        let cell = home.cell();
        tracing::error!(
            cell,
            error = &error as &dyn std::error::Error,
            "What a cell's network was made of can't be read: it is taken away as it would be made now"
        );
        // Nobody could ever read it: better an address that is lost than a pod that never ends.
        let presumed =
            known.attachment.as_ref().map(|attachment| self.plan(attachment)).transpose();
        Ok(presumed.unwrap_or_else(|error| {
            tracing::error!(
                cell,
                error = &error as &dyn std::error::Error,
                "A cell's network is not taken away"
            );
            None
        }))
    }

    /// Writes down what is about to be made. From then on the ports are this cell's.
    async fn begin(&self, home: &Home, plan: &Plan) -> Result<(), ProviderError> {
        if plan.ports.is_empty() {
            return plan.write(home);
        }
        let doing = || format!("give {} the ports of its pod", home.cell());
        Ports::new(home, plan.own_ports())
            .check()
            .map_err(|error| ProviderError::new(ErrorClass::Invalid, doing(), error))?;
        let _alone = self.ports_lock.lock().await;
        let cells = home.dir().parent().unwrap_or(home.dir());
        let (homes, _) = Home::all(cells).map_err(|error| {
            ProviderError::transient(format!("list {}", cells.display()), error)
        })?;
        for other in homes.iter().filter(|other| *other != home) {
            let taken = match Plan::read(other) {
                Ok(Some(taken)) => taken,
                Err(error) if lacks_means(&error) => return Err(error),
                // What can't be read has been told when its cell's turn came, and holds nobody up.
                Ok(None) | Err(_) => continue,
            };
            if let Some(port) =
                plan.ports.iter().find(|port| taken.ports.iter().any(|taken| taken.overlaps(port)))
            {
                let pod = format!("{}/{}", taken.pod_namespace, taken.pod_name);
                let error =
                    PortError::Taken { port: port.clone(), pod, cell: other.cell().to_owned() };
                // The other may be on its way out: the kubelet tries again.
                return Err(ProviderError::transient(doing(), error));
            }
        }
        plan.write(home)
    }

    /// Takes away what [`Networks::attach`] made or began to make, and forgets it. Its processes
    /// have ended; its network namespace is still there.
    pub(super) async fn detach(&self, home: &Home, plan: &Plan) -> Result<(), ProviderError> {
        let doing = || format!("detach {} from the network", home.cell());
        Ports::new(home, plan.own_ports())
            .close()
            .await
            .map_err(|error| ProviderError::transient(doing(), error))?;
        match &plan.way {
            Way::Cni(network) => {
                network
                    .del(home, &plan.pod())
                    .await
                    .map_err(|error| ProviderError::transient(doing(), error))?;
                // A plugin that maps ports leaves the flows of before.
                if plan.way.maps_ports() {
                    Ports::new(home, &plan.ports).forget_flows().await;
                }
            }
            Way::Bridge(bridge) => {
                let _alone = self.bridge_lock.lock().await;
                bridge
                    .detach(home)
                    .await
                    .map_err(|error| ProviderError::transient(doing(), error))?;
            }
        }
        remove_if_there(&home.network_file())
            .map_err(|error| ProviderError::transient(doing(), error))
    }
}

/// Whether something was not read for want of something of ours: another time it will be.
fn lacks_means(error: &ProviderError) -> bool {
    error
        .source
        .as_deref()
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(is_shortage)
}

/// Removes a file. Absent is fine.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
