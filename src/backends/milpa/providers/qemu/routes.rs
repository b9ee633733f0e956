//! The device, routes and name servers of a pod, as `ip -j` and resolv.conf(5) say them.

use std::net::IpAddr;

use kiyot_link::{bind_limits::MAX_ROUTES, mac_address::MacAddress};
use serde::Deserialize;

use super::super::{DeviceAddress, PodNetwork, Route};

/// An error of reading a pod's network.
#[derive(Debug, thiserror::Error)]
pub(super) enum RouteError {
    #[error("the output of ip is not JSON")]
    Json(#[from] serde_json::Error),
    #[error("the pod's device is not listed")]
    NoDevice,
    #[error("hardware address {0:?}")]
    Mac(String),
    #[error("destination or gateway {0:?}")]
    Address(String),
    #[error("address {0} is not on the pod's device")]
    NoAddress(IpAddr),
    #[error("{0} routes; allowed are {MAX_ROUTES}")]
    Many(usize),
}

/// The pod's device.
#[derive(Debug, Deserialize)]
pub(super) struct Device {
    #[serde(default)]
    ifname: String,
    #[serde(default)]
    address: String,
    #[serde(default)]
    mtu: u32,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Debug, Deserialize)]
struct Address {
    #[serde(default)]
    local: String,
    #[serde(default)]
    prefixlen: u8,
}

#[derive(Debug, Deserialize)]
struct Line {
    dst: String,
    gateway: Option<String>,
    #[serde(default)]
    protocol: String,
    #[serde(rename = "type")]
    kind: Option<String>,
}

impl Device {
    /// Reads the output of `ip -j address show dev DEVICE`.
    pub(super) fn parse(output: &[u8]) -> Result<Self, RouteError> {
        let devices: Vec<Self> = serde_json::from_slice(output)?;
        devices.into_iter().find(|device| !device.ifname.is_empty()).ok_or(RouteError::NoDevice)
    }

    /// Returns the network of a pod with these addresses.
    pub(super) fn network(
        self,
        addresses: &[IpAddr],
        routes: Vec<Route>,
    ) -> Result<PodNetwork, RouteError> {
        let prefix_of = |address: &IpAddr| {
            let is_own = |info: &&Address| info.local.parse::<IpAddr>().ok() == Some(*address);
            let info = self.addr_info.iter().find(is_own);
            info.map(|info| DeviceAddress { address: *address, prefix_len: info.prefixlen })
                .ok_or(RouteError::NoAddress(*address))
        };
        Ok(PodNetwork {
            mac: self
                .address
                .parse::<MacAddress>()
                .map_err(|_| RouteError::Mac(self.address.clone()))?,
            mtu: self.mtu,
            addresses: addresses.iter().map(prefix_of).collect::<Result<_, _>>()?,
            routes,
            name_servers: Vec::new(),
            search: Vec::new(),
        })
    }
}

/// Reads the output of `ip -j route show dev DEVICE`. Routes on the link come first, because
/// gateways are reached by them. The kernel makes those of its own in the guest, too.
pub(super) fn parse(output: &[u8]) -> Result<Vec<Route>, RouteError> {
    // Without a route, older versions print nothing.
    let lines: Vec<Line> = match output.trim_ascii() {
        b"" => Vec::new(),
        output => serde_json::from_slice(output)?,
    };
    let is_given = |line: &&Line| {
        line.protocol != "kernel" && line.kind.as_deref().is_none_or(|kind| kind == "unicast")
    };
    let mut routes =
        lines.iter().filter(is_given).map(Line::route).collect::<Result<Vec<_>, _>>()?;
    if routes.len() > MAX_ROUTES {
        return Err(RouteError::Many(routes.len()));
    }
    routes.sort_by_key(|route| route.gateway.is_some());
    Ok(routes)
}

impl Line {
    fn route(&self) -> Result<Route, RouteError> {
        let gateway = self.gateway.as_deref().map(address).transpose()?;
        let destination = match self.dst.split_once('/') {
            Some((network, length)) => DeviceAddress {
                address: address(network)?,
                prefix_len: length.parse().map_err(|_| RouteError::Address(self.dst.clone()))?,
            },
            None if self.dst == "default" => {
                let is_v6 = gateway.is_some_and(|gateway| gateway.is_ipv6());
                let any: IpAddr = if is_v6 { [0_u16; 8].into() } else { [0_u8; 4].into() };
                DeviceAddress { address: any, prefix_len: 0 }
            }
            None => {
                let address = address(&self.dst)?;
                DeviceAddress { address, prefix_len: if address.is_ipv4() { 32 } else { 128 } }
            }
        };
        Ok(Route { destination, gateway })
    }
}

fn address(text: &str) -> Result<IpAddr, RouteError> {
    text.parse().map_err(|_| RouteError::Address(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &[u8] = br#"[{},{"ifindex":2,"ifname":"eth0","mtu":1450,
        "address":"fe:08:90:e9:57:9d","addr_info":[
        {"family":"inet","local":"10.1.2.3","prefixlen":24,"scope":"global"},
        {"family":"inet6","local":"fd00::7","prefixlen":64,"scope":"global"},
        {"family":"inet6","local":"fe80::fc08:90ff:fee9:579d","prefixlen":64,"scope":"link"}]}]"#;

    #[test]
    fn network_has_the_addresses_of_the_pod_with_their_prefixes() {
        let addresses = ["10.1.2.3", "fd00::7"].map(|text| text.parse().unwrap());
        let network = Device::parse(DEVICE).unwrap().network(&addresses, Vec::new()).unwrap();
        let texts: Vec<_> = network.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.1.2.3/24", "fd00::7/64"]);
        assert_eq!((network.mtu, network.mac.to_string().as_str()), (1450, "fe:08:90:e9:57:9d"));
        let other = ["10.1.2.4".parse().unwrap()];
        assert!(Device::parse(DEVICE).unwrap().network(&other, Vec::new()).is_err());
        assert!(Device::parse(b"[]").is_err());
    }

    #[test]
    fn routes_on_the_link_come_first_and_those_of_the_kernel_are_left_out() {
        let routes = parse(
            br#"[{"dst":"default","gateway":"169.254.1.1","flags":[]},
            {"dst":"169.254.1.1","scope":"link","flags":[]},
            {"dst":"10.1.2.0/24","protocol":"kernel","scope":"link","prefsrc":"10.1.2.3"},
            {"type":"unreachable","dst":"10.9.0.0/16","flags":[]}]"#,
        )
        .unwrap();
        let texts: Vec<_> = routes
            .iter()
            .map(|route| (route.destination.to_string(), route.gateway.map(|to| to.to_string())))
            .collect();
        assert_eq!(
            texts,
            [
                ("169.254.1.1/32".to_owned(), None),
                ("0.0.0.0/0".to_owned(), Some("169.254.1.1".to_owned()))
            ]
        );
        assert_eq!(parse(b"\n").unwrap(), []);
    }

    #[test]
    fn default_route_has_the_family_of_its_gateway() {
        let routes = parse(br#"[{"dst":"default","gateway":"fd00::1","protocol":"static"}]"#);
        assert_eq!(routes.unwrap()[0].destination.to_string(), "::/0");
    }
}
