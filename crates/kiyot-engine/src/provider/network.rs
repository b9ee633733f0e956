//! The network of a pod, as its cell gets it.

use std::{fmt, net::IpAddr, num::NonZeroU32};

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
    /// The neighbours with known hardware addresses.
    pub neighbours: Vec<Neighbour>,
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
    /// True if the gateway is on the link although no route says so.
    pub on_link: bool,
    /// The largest packet, in bytes; `None` for that of the device.
    pub mtu: Option<NonZeroU32>,
}

/// A neighbour on the link of the pod's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: MacAddress,
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_len)
    }
}

impl From<&PodNetwork> for cell::PodNetwork {
    fn from(network: &PodNetwork) -> Self {
        let PodNetwork { mac, mtu, addresses, routes, neighbours, name_servers, search } = network;
        let route = |route: &Route| cell::Route {
            destination: route.destination.to_string(),
            gateway: route.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
            mtu: route.mtu.map_or(0, NonZeroU32::get),
            on_link: route.on_link,
        };
        let neighbour = |neighbour: &Neighbour| cell::Neighbour {
            address: neighbour.address.to_string(),
            mac: neighbour.mac.to_string(),
        };
        Self {
            mac: mac.to_string(),
            mtu: *mtu,
            addresses: addresses.iter().map(ToString::to_string).collect(),
            routes: routes.iter().map(route).collect(),
            neighbours: neighbours.iter().map(neighbour).collect(),
            name_servers: name_servers.iter().map(ToString::to_string).collect(),
            search: search.clone(),
            has_all_routes: true,
        }
    }
}
