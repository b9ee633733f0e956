//! The VPC: a bridge for each subnet. This host routes between the bridges.

use std::{
    path::PathBuf,
    sync::{Arc, LazyLock},
};

use kiyot_testkit::output;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{cloud::Subnet, machine::ip};

/// Address of the metadata service.
pub(crate) const METADATA_ADDRESS: &str = "169.254.169.254";

/// Permit for the single VPC of this process: its addresses and links are fixed.
static VPC: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(1)));

/// A subnet with its bridge.
#[derive(Debug, Clone)]
pub(crate) struct BridgedSubnet {
    id: String,
    pub(crate) bridge: String,
    pub(crate) gateway: String,
    pub(crate) prefix: String,
}

/// Bridges, the metadata service's address, and the file system of roots.
#[derive(Debug)]
pub(crate) struct Vpc {
    subnets: Vec<BridgedSubnet>,
    roots: PathBuf,
    _permit: OwnedSemaphorePermit,
}

impl Vpc {
    /// Makes the bridges, after the process's previous VPC has ended.
    pub(crate) async fn make(subnets: &[Subnet], roots: PathBuf) -> Result<Self, String> {
        let permit = Arc::clone(&VPC)
            .acquire_owned()
            .await
            .map_err(|error| format!("permit of the VPC: {error}"))?;
        let bridged = subnets.iter().enumerate().filter_map(|(index, subnet)| {
            let (network, prefix) = subnet.cidr.split_once('/')?;
            Some(BridgedSubnet {
                id: subnet.id.clone(),
                bridge: format!("vpc-subnet{index}"),
                gateway: format!("{}.1", network.rsplit_once('.')?.0),
                prefix: prefix.to_owned(),
            })
        });
        // Dropping it after an error removes what was made.
        let vpc = Self { subnets: bridged.collect(), roots, _permit: permit };
        std::fs::create_dir_all(&vpc.roots).map_err(|error| error.to_string())?;
        // An overlay's upper directory can't be in its lower file system.
        let roots = vpc.roots.display().to_string();
        output("mount", &["-t", "tmpfs", "-o", "mode=700", "roots", &roots])?;
        // As in a VPC, the host's firewall sees no packet between instances.
        let _absent = std::fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        ip(&["address", "add", &format!("{METADATA_ADDRESS}/32"), "dev", "lo"])?;
        for (index, subnet) in vpc.subnets.iter().enumerate() {
            // A bridge without its own address takes the lowest address of its ports. This address
            // changes with each instance, while others send to the cached old address.
            let address = format!("02:00:00:00:ff:{index:02x}");
            ip(&["link", "add", &subnet.bridge, "address", &address, "type", "bridge"])?;
            let gateway = format!("{}/{}", subnet.gateway, subnet.prefix);
            ip(&["address", "add", &gateway, "dev", &subnet.bridge])?;
            ip(&["link", "set", &subnet.bridge, "up"])?;
        }
        Ok(vpc)
    }

    /// Returns all subnets.
    pub(crate) fn subnets(&self) -> &[BridgedSubnet] {
        &self.subnets
    }

    /// Returns a subnet by its id.
    pub(crate) fn subnet(&self, id: &str) -> Option<&BridgedSubnet> {
        self.subnets.iter().find(|subnet| subnet.id == id)
    }

    /// Gives this host an address in a subnet.
    pub(crate) fn add_host(&self, subnet: &str, address: &str) -> Result<(), String> {
        let subnet = self.subnet(subnet).ok_or_else(|| format!("subnet {subnet}: unknown"))?;
        let address = format!("{address}/{}", subnet.prefix);
        ip(&["address", "add", &address, "dev", &subnet.bridge])
    }
}

impl Drop for Vpc {
    fn drop(&mut self) {
        for subnet in &self.subnets {
            let _ = ip(&["link", "delete", &subnet.bridge]);
        }
        let _ = ip(&["address", "delete", &format!("{METADATA_ADDRESS}/32"), "dev", "lo"]);
        let _ = output("umount", &[&self.roots.display().to_string()]);
    }
}
