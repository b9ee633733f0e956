//! The VPC: a network namespace with a bridge for each subnet, which routes between the bridges. An
//! instance is connected to the bridge of its subnet by a port, and so is this host.

use std::{
    fs::File,
    io,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    thread,
};

use kiyot_testkit::{command, output};
use rustix::{
    fd::AsFd,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{cloud::Subnet, instance::Instance, machine::ip, query::Query, shared::Shared};

mod groups;
mod rules;

use rules::Network;
pub(crate) use rules::Port;

/// Address of the metadata service.
pub(crate) const METADATA_ADDRESS: &str = "169.254.169.254";

/// Addresses of the VPC.
pub(crate) const CIDR: &str = "10.77.0.0/16";

/// Name of the VPC's network namespace.
pub(crate) const NAMESPACE: &str = "vpc";

/// This host's interface in the VPC.
const HOST_LINK: &str = "vpc0";
/// The end of the host's interface in the VPC.
const HOST_PORT: &str = "host";

/// The link of the NAT gateway: its name in the VPC and on this host, and the addresses there.
const NAT_LINK: &str = "nat";
const NAT_HOST_LINK: &str = "nat0";
const NAT_ADDRESS: &str = "100.64.0.2";
const NAT_HOST_ADDRESS: &str = "100.64.0.1";

/// Settings of the namespace, below `/proc/sys/net`. Its firewall sees also the packets between
/// instances of a subnet.
const SETTINGS: &str = "\
    echo 1 > ipv4/ip_forward
    echo 0 > ipv4/conf/all/send_redirects
    echo 0 > ipv4/conf/default/send_redirects
    echo 0 > ipv4/conf/all/rp_filter
    echo 0 > ipv4/conf/default/rp_filter
    echo 1 > bridge/bridge-nf-call-iptables";

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

/// The namespace with its bridges, the metadata service's address, and the file system of roots.
#[derive(Debug)]
pub(crate) struct Vpc {
    subnets: Vec<BridgedSubnet>,
    roots: PathBuf,
    network: Mutex<Network>,
    _permit: OwnedSemaphorePermit,
}

impl Vpc {
    /// Makes the namespace, after the process's previous VPC has ended.
    pub(crate) async fn make(subnets: &[Subnet], roots: PathBuf) -> Result<Self, String> {
        let permit = Arc::clone(&VPC)
            .acquire_owned()
            .await
            .map_err(|error| format!("permit of the VPC: {error}"))?;
        let bridged = subnets.iter().enumerate().filter_map(|(index, subnet)| {
            let (network, prefix) = subnet.cidr.split_once('/')?;
            Some(BridgedSubnet {
                id: subnet.id.clone(),
                bridge: format!("subnet{index}"),
                gateway: format!("{}.1", network.rsplit_once('.')?.0),
                prefix: prefix.to_owned(),
            })
        });
        // Dropping it after an error removes what was made.
        let vpc =
            Self { subnets: bridged.collect(), roots, network: Mutex::default(), _permit: permit };
        std::fs::create_dir_all(&vpc.roots).map_err(|error| error.to_string())?;
        // An overlay's upper directory can't be in its lower file system.
        let roots = vpc.roots.display().to_string();
        output("mount", &["-t", "tmpfs", "-o", "mode=700", "roots", &roots])?;
        ip(&["netns", "add", NAMESPACE])?;
        vpc.run(&["sh", "-ec", &format!("cd /proc/sys/net\n{SETTINGS}")])?;
        vpc.ip(&["link", "set", "lo", "up"])?;
        vpc.ip(&["address", "add", &format!("{METADATA_ADDRESS}/32"), "dev", "lo"])?;
        vpc.add_nat()?;
        for (index, subnet) in vpc.subnets.iter().enumerate() {
            // A bridge without its own address takes the lowest address of its ports. This address
            // changes with each instance, while others send to the cached old address.
            let address = format!("02:00:00:00:ff:{index:02x}");
            vpc.ip(&["link", "add", &subnet.bridge, "address", &address, "type", "bridge"])?;
            let gateway = format!("{}/{}", subnet.gateway, subnet.prefix);
            vpc.ip(&["address", "add", &gateway, "dev", &subnet.bridge])?;
            vpc.ip(&["link", "set", &subnet.bridge, "up"])?;
        }
        Ok(vpc)
    }

    /// Adds the NAT gateway, behind which this host's other addresses are.
    fn add_nat(&self) -> Result<(), String> {
        let peer = ["peer", "name", NAT_LINK, "netns", NAMESPACE];
        ip(&[&["link", "add", NAT_HOST_LINK, "type", "veth"][..], &peer].concat())?;
        ip(&["address", "add", &format!("{NAT_HOST_ADDRESS}/30"), "dev", NAT_HOST_LINK])?;
        ip(&["link", "set", NAT_HOST_LINK, "up"])?;
        self.ip(&["address", "add", &format!("{NAT_ADDRESS}/30"), "dev", NAT_LINK])?;
        self.ip(&["link", "set", NAT_LINK, "up"])?;
        self.ip(&["route", "add", "default", "via", NAT_HOST_ADDRESS])
    }

    /// Returns all subnets.
    pub(crate) fn subnets(&self) -> &[BridgedSubnet] {
        &self.subnets
    }

    /// Returns a subnet by its id.
    pub(crate) fn subnet(&self, id: &str) -> Result<&BridgedSubnet, String> {
        let mut subnets = self.subnets.iter();
        subnets.find(|subnet| subnet.id == id).ok_or_else(|| format!("subnet {id}: not of the VPC"))
    }

    /// Runs `ip` in the namespace.
    pub(crate) fn ip(&self, arguments: &[&str]) -> Result<(), String> {
        ip(&[&["-n", NAMESPACE], arguments].concat())
    }

    /// Runs a program in the namespace.
    fn run(&self, words: &[&str]) -> Result<(), String> {
        output("nsenter", &[&[namespace_option().as_str()], words].concat()).map(drop)
    }

    /// Returns the result of a function that makes a socket, called in the namespace. The socket
    /// stays in the namespace.
    pub(crate) fn socket<T: Send + 'static>(
        &self,
        make: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let made = thread::spawn(move || {
            let namespace = File::open(format!("/run/netns/{NAMESPACE}"))?;
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network)?;
            make()
        });
        made.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    }

    /// Connects a link of the namespace to the bridge of its subnet.
    pub(crate) fn plug(&self, instance: &str, port: Port) -> Result<(), String> {
        let Port { link, mac, bridge, addresses, .. } = &port;
        self.ip(&["link", "set", link, "master", bridge, "up"])?;
        // The VPC answers ARP for the addresses that it knows, and learns none.
        let of_bridge = ["proxy_arp", "on", "learning", "off", "flood", "off"];
        self.ip(&[&["link", "set", link, "type", "bridge_slave"][..], &of_bridge].concat())?;
        let fdb = ["-n", NAMESPACE, "fdb", "replace", mac, "dev", link, "master", "static"];
        output("bridge", &fdb)?;
        for address in addresses {
            let of = ["lladdr", mac, "dev", bridge, "nud", "permanent"];
            self.ip(&[&["neigh", "replace", address][..], &of].concat())?;
        }
        self.change(|network| drop(network.ports.insert(instance.to_owned(), port)))
    }

    /// Removes the port of an instance, with its link.
    pub(crate) fn unplug(&self, instance: &str) -> Result<(), String> {
        let port = self.lock().ports.remove(instance);
        let Some(Port { link, bridge, addresses, .. }) = port else { return Ok(()) };
        let removed = self.change(|_| {});
        for address in addresses {
            self.ip(&["neigh", "delete", &address, "dev", &bridge])?;
        }
        self.ip(&["link", "delete", &link])?;
        removed
    }

    /// Turns the source/destination check of an instance on or off.
    pub(crate) fn set_checked(&self, instance: &str, is_checked: bool) -> Result<(), String> {
        self.change(|network| {
            if let Some(port) = network.ports.get_mut(instance) {
                port.is_checked = is_checked;
            }
        })
    }

    /// Connects this host, an instance.
    pub(crate) fn plug_host(&self, host: &Instance) -> Result<(), String> {
        let subnet = self.subnet(&host.subnet)?;
        let port = host.port(HOST_PORT, &subnet.bridge);
        let address = format!("{}/{}", host.address, subnet.prefix);
        let peer = ["peer", "name", &port.link, "netns", NAMESPACE];
        let link = ["link", "add", HOST_LINK, "address", &port.mac, "type", "veth"];
        ip(&[&link[..], &peer].concat())?;
        ip(&["address", "add", &address, "dev", HOST_LINK])?;
        ip(&["link", "set", HOST_LINK, "up"])?;
        self.plug(&host.id, port)?;
        for network in [CIDR, METADATA_ADDRESS] {
            ip(&["route", "add", network, "via", &subnet.gateway, "dev", HOST_LINK])?;
        }
        Ok(())
    }

    /// Applies security groups and routes as moto lists them.
    pub(crate) async fn read(self: &Arc<Self>, shared: &Shared) -> Result<(), String> {
        let list = async |action| shared.moto(&Query::new(action, &[]), None).await;
        let groups = groups::groups(&list("DescribeSecurityGroups").await?.root());
        let routes = groups::routes(&list("DescribeRouteTables").await?.root());
        self.blocking(|vpc| {
            vpc.change(|network| (network.groups, network.routes) = (groups, routes))
        })
        .await
    }

    /// Calls a function that blocks.
    pub(crate) async fn blocking(
        self: &Arc<Self>,
        call: impl FnOnce(&Self) -> Result<(), String> + Send + 'static,
    ) -> Result<(), String> {
        let vpc = Arc::clone(self);
        let called = tokio::task::spawn_blocking(move || call(&vpc)).await;
        called.map_err(|error| error.to_string())?
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the ports, groups or routes, and applies their rules.
    fn change(&self, change: impl FnOnce(&mut Network)) -> Result<(), String> {
        let mut network = self.lock();
        change(&mut network);
        restore("ebtables-restore", &network.of_frames())?;
        restore("iptables-restore", &network.of_packets())?;
        self.ip(&["route", "flush", "proto", "static"])?;
        for route in &network.routes {
            let Some(Port { bridge, addresses, .. }) = network.ports.get(&route.instance) else {
                continue;
            };
            let Some(address) = addresses.first() else { continue };
            let via = ["via", address, "dev", bridge, "proto", "static"];
            self.ip(&[&["route", "replace", &route.network][..], &via].concat())?;
        }
        Ok(())
    }
}

impl Drop for Vpc {
    fn drop(&mut self) {
        for link in [HOST_LINK, NAT_HOST_LINK] {
            let _ = ip(&["link", "delete", link]);
        }
        let _ = ip(&["netns", "delete", NAMESPACE]);
        let _ = output("umount", &[&self.roots.display().to_string()]);
    }
}

/// Returns the option of `nsenter` for the VPC.
pub(crate) fn namespace_option() -> String {
    format!("--net=/run/netns/{NAMESPACE}")
}

/// Replaces the rules in the namespace.
fn restore(program: &str, rules: &str) -> Result<(), String> {
    let failed = |error: io::Error| format!("{program}: {error}");
    let mut child = Command::new("nsenter")
        .args([&namespace_option(), program])
        .env("PATH", command::PATH)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    child
        .stdin
        .take()
        .map_or(Ok(()), |mut stdin| stdin.write_all(rules.as_bytes()))
        .map_err(failed)?;
    let output = child.wait_with_output().map_err(failed)?;
    let error = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("{program}: {error}\n{rules}"))
}
