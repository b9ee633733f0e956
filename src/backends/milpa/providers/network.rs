//! The network of a pod, as its cell gets it.

use std::{fmt, net::IpAddr};

use kiyot_link::mac_address::MacAddress;
use kiyot_proto::cell;

/// The outcome of an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attached {
    /// The pod's addresses, the pod's first.
    pub addresses: Vec<IpAddr>,
    /// The network that the cell's agent configures; `None` if it is already made.
    pub network: Option<PodNetwork>,
}

impl Attached {
    /// Returns the outcome where the provider has configured the cell's network itself.
    pub fn already_made(addresses: Vec<IpAddr>) -> Self {
        Self { addresses, network: None }
    }
}

/// The network that an agent configures on its own machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// The hardware address of the pod's device.
    pub mac: MacAddress,
    /// The largest packet of the pod's device, in bytes.
    pub mtu: u32,
    /// The addresses of the pod's device, the pod's first.
    pub addresses: Vec<DeviceAddress>,
    /// The routes, in the order in which they are added.
    pub routes: Vec<Route>,
    /// The name servers of the cell itself, for the pulls of its containerd.
    pub name_servers: Vec<IpAddr>,
    /// The search domains of the cell itself.
    pub search: Vec<String>,
}

/// An address of a device, with the length of its network's prefix, in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceAddress {
    /// The address.
    pub address: IpAddr,
    /// The length of the prefix.
    pub prefix_len: u8,
}

/// A route of the pod's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The destination: a network, or a default route (prefix length 0).
    pub destination: DeviceAddress,
    /// The gateway; `None` for a destination on the link.
    pub gateway: Option<IpAddr>,
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_len)
    }
}

impl From<&PodNetwork> for cell::PodNetwork {
    fn from(network: &PodNetwork) -> Self {
        let PodNetwork { mac, mtu, addresses, routes, name_servers, search } = network;
        let route = |route: &Route| cell::Route {
            destination: route.destination.to_string(),
            gateway: route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        };
        Self {
            mac: mac.to_string(),
            mtu: *mtu,
            addresses: addresses.iter().map(ToString::to_string).collect(),
            routes: routes.iter().map(route).collect(),
            name_servers: name_servers.iter().map(ToString::to_string).collect(),
            search: search.clone(),
        }
    }
}
