//! The network of cells: the node's CNI configuration if there is one, otherwise a bridge of the
//! provider.
//!
//! The instance's `network.json` records the network and its configuration before the network is
//! created. A later daemon removes the network by this record, even if the node's configuration has
//! changed meanwhile.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use kiyot_engine::provider::{Attachment, ErrorClass, HostPort, ProviderError};
use serde::{Deserialize, Serialize};

use crate::{
    instance::{Home, InstanceRecord},
    shortage::is_shortage,
};

pub(super) mod bridge;
pub(super) mod cni;
mod conntrack;
pub(super) mod namespace;
mod ports;
pub(super) mod remote;
mod rules;

use ports::{PortError, Ports};

/// The pod's device in the cell.
pub(crate) const DEVICE: &str = "eth0";

/// The content of an instance's `network.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Plan {
    pod_name: String,
    pod_namespace: String,
    pod_uid: String,
    sandbox: String,
    way: Way,
    /// The host ports of the cell.
    #[serde(default)]
    ports: Vec<HostPort>,
    /// The pod's addresses, its primary address first; `None` until the network exists.
    addresses: Option<Vec<IpAddr>>,
}

/// The kind of the network.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Cni(Box<cni::Network>),
    Bridge(bridge::Bridge),
}

/// The networks of this node's cells.
#[derive(Debug)]
pub(super) struct Networks {
    pub(super) cni_conf_dir: PathBuf,
    pub(super) cni_bin_dirs: Vec<PathBuf>,
    pub(super) bridge: bridge::Bridge,
    /// Serialises the creation and removal of the bridge.
    pub(super) bridge_lock: tokio::sync::Mutex<()>,
    /// Serialises the reservation of host ports.
    pub(super) ports_lock: tokio::sync::Mutex<()>,
}

impl Way {
    /// Returns whether a CNI plugin maps the host ports.
    fn maps_ports(&self) -> bool {
        matches!(self, Self::Cni(network) if network.maps_ports())
    }

    /// Returns the subnets of the cell's link, once it exists.
    fn subnets(&self) -> Vec<String> {
        match self {
            Self::Cni(network) => network.subnets(),
            Self::Bridge(bridge) => vec![bridge.subnet()],
        }
    }
}

impl Plan {
    /// Returns the recorded network; `None` if its creation never began.
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

    /// Returns `metadata.uid` of the pod.
    pub(super) fn pod_uid(&self) -> Option<&str> {
        Some(&*self.pod_uid).filter(|uid| !uid.is_empty())
    }

    fn pod(&self) -> cni::Pod<'_> {
        let Self { pod_name, pod_namespace, pod_uid, sandbox, ports, .. } = self;
        cni::Pod { name: pod_name, namespace: pod_namespace, uid: pod_uid, sandbox, ports }
    }

    /// Returns the host ports that no plugin maps.
    fn own_ports(&self) -> &[HostPort] {
        if self.way.maps_ports() { &[] } else { &self.ports }
    }
}

impl Networks {
    /// Checks whether a network can be created. The error names a missing part.
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

    /// Attaches an instance to the pod's network. A repeated call returns the same addresses; after
    /// a failed attempt it starts again.
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
        home.keep(&InstanceRecord { attachment: Some(to.clone()), ..known })?;
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

    /// Returns the network of a pod by the node's current configuration.
    fn plan(&self, to: &Attachment) -> Result<Plan, ProviderError> {
        let way = match self.configured()? {
            Some(network) => Way::Cni(Box::new(network)),
            None => Way::Bridge(self.bridge.clone()),
        };
        let Attachment { pod_name, pod_namespace, pod_uid, sandbox, ports, .. } = to.clone();
        Ok(Plan { pod_name, pod_namespace, pod_uid, sandbox, way, ports, addresses: None })
    }

    /// Returns the recorded network, or the network by the current configuration if the record is
    /// unreadable; `None` if its creation never began.
    pub(super) fn plan_of(
        &self,
        home: &Home,
        known: &InstanceRecord,
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
            "network record unreadable, network is removed by the current configuration"
        );
        // The record stays unreadable: a lost address is better than a pod that never ends.
        let presumed =
            known.attachment.as_ref().map(|attachment| self.plan(attachment)).transpose();
        Ok(presumed.unwrap_or_else(|error| {
            tracing::error!(
                cell,
                error = &error as &dyn std::error::Error,
                "network of a cell not removed"
            );
            None
        }))
    }

    /// Records the network before its creation, which reserves the host ports.
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
                // An unreadable record is logged for its own cell, and does not block others.
                Ok(None) | Err(_) => continue,
            };
            if let Some(port) =
                plan.ports.iter().find(|port| taken.ports.iter().any(|taken| taken.overlaps(port)))
            {
                let pod = format!("{}/{}", taken.pod_namespace, taken.pod_name);
                let error =
                    PortError::Taken { port: port.clone(), pod, cell: other.cell().to_owned() };
                // The other pod may be terminating: the kubelet retries.
                return Err(ProviderError::transient(doing(), error));
            }
        }
        plan.write(home)
    }

    /// Removes the network that [`Networks::attach`] created or began to create, and its record.
    /// The caller has ended the cell's processes; the cell's network namespace still exists.
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
                // A plugin that maps ports leaves conntrack entries behind.
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

/// Returns whether a read failed because the daemon lacked resources, so that a retry may succeed.
fn lacks_means(error: &ProviderError) -> bool {
    error
        .source
        .as_deref()
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(is_shortage)
}

/// Removes a file, if it exists.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
