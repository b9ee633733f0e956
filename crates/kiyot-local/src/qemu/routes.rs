//! The device, routes and neighbours of a pod, parsed from `ip -j`.

use std::{net::IpAddr, num::NonZeroU32};

use kiyot_engine::provider::{DeviceAddress, Neighbour, PodNetwork, Route};
use kiyot_link::{
    bind_limits::{MAX_ENTRIES, MAX_ROUTES},
    mac_address::MacAddress,
};
use serde::Deserialize;

/// The flag of a route whose gateway is on the link even without a route to it.
const ON_LINK: &str = "onlink";

/// An error while reading a pod's network.
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
    #[error("{0} permanent neighbours; allowed are {MAX_ENTRIES}")]
    ManyNeighbours(usize),
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
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    metrics: Vec<Metrics>,
}

#[derive(Debug, Deserialize)]
struct Metrics {
    mtu: Option<NonZeroU32>,
}

#[derive(Debug, Deserialize)]
struct NeighbourLine {
    dst: String,
    /// The hardware address; absent for a proxy.
    lladdr: Option<String>,
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
        neighbours: Vec<Neighbour>,
    ) -> Result<PodNetwork, RouteError> {
        if neighbours.len() > MAX_ENTRIES {
            return Err(RouteError::ManyNeighbours(neighbours.len()));
        }
        let prefix_of = |address: &IpAddr| {
            let is_own = |info: &&Address| info.local.parse::<IpAddr>().ok() == Some(*address);
            let info = self.addr_info.iter().find(is_own);
            info.map(|info| DeviceAddress { address: *address, prefix_len: info.prefixlen })
                .ok_or(RouteError::NoAddress(*address))
        };
        Ok(PodNetwork {
            mac: mac_address(&self.address)?,
            mtu: self.mtu,
            addresses: addresses.iter().map(prefix_of).collect::<Result<_, _>>()?,
            routes,
            neighbours,
            name_servers: Vec::new(),
            search: Vec::new(),
        })
    }
}

/// Parses the output of `ip -j -4 route show dev DEVICE`, or the same with `-6`; `any` is the
/// destination of the family's default routes.
///
/// Routes on the link come first, because gateways are reached by them. Among them is the kernel's
/// route of an address, unless the CNI plugin has removed it. The link-local route is left out,
/// because the guest's kernel makes it.
pub(super) fn parse(output: &[u8], any: IpAddr) -> Result<Vec<Route>, RouteError> {
    let lines: Vec<Line> = listed(output)?;
    let is_unicast = |line: &&Line| line.kind.as_deref().is_none_or(|kind| kind == "unicast");
    let routes = lines.iter().filter(is_unicast).map(|line| line.route(any));
    let mut routes = routes.collect::<Result<Vec<_>, _>>()?;
    routes.retain(|route| !is_link_local(route));
    if routes.len() > MAX_ROUTES {
        return Err(RouteError::Many(routes.len()));
    }
    routes.sort_by_key(|route| route.gateway.is_some());
    Ok(routes)
}

/// Parses the output of `ip -j neigh show dev DEVICE nud permanent`.
pub(super) fn parse_neighbours(output: &[u8]) -> Result<Vec<Neighbour>, RouteError> {
    let lines: Vec<NeighbourLine> = listed(output)?;
    let with_mac = lines.iter().filter_map(|line| Some((line, line.lladdr.as_deref()?)));
    with_mac
        .map(|(line, mac)| Ok(Neighbour { address: address(&line.dst)?, mac: mac_address(mac)? }))
        .collect()
}

/// Parses a list. For an empty list, older versions of `ip` print nothing.
fn listed<T: for<'a> Deserialize<'a>>(output: &[u8]) -> Result<Vec<T>, RouteError> {
    match output.trim_ascii() {
        b"" => Ok(Vec::new()),
        output => Ok(serde_json::from_slice(output)?),
    }
}

impl Line {
    fn route(&self, any: IpAddr) -> Result<Route, RouteError> {
        let gateway = self.gateway.as_deref().map(address).transpose()?;
        let destination = match self.dst.split_once('/') {
            Some((network, length)) => DeviceAddress {
                address: address(network)?,
                prefix_len: length.parse().map_err(|_| RouteError::Address(self.dst.clone()))?,
            },
            None if self.dst == "default" => DeviceAddress { address: any, prefix_len: 0 },
            None => {
                let address = address(&self.dst)?;
                DeviceAddress { address, prefix_len: if address.is_ipv4() { 32 } else { 128 } }
            }
        };
        Ok(Route {
            destination,
            gateway,
            on_link: self.flags.iter().any(|flag| flag == ON_LINK),
            mtu: self.metrics.iter().find_map(|metrics| metrics.mtu),
        })
    }
}

/// Returns whether a route leads to link-local addresses of IPv6.
fn is_link_local(route: &Route) -> bool {
    matches!(route.destination.address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn mac_address(text: &str) -> Result<MacAddress, RouteError> {
    text.parse().map_err(|_| RouteError::Mac(text.to_owned()))
}

fn address(text: &str) -> Result<IpAddr, RouteError> {
    text.parse().map_err(|_| RouteError::Address(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

    const DEVICE: &[u8] = br#"[{},{"ifindex":2,"ifname":"eth0","mtu":1450,
        "address":"fe:08:90:e9:57:9d","addr_info":[
        {"family":"inet","local":"10.1.2.3","prefixlen":24,"scope":"global"},
        {"family":"inet6","local":"fd00::7","prefixlen":64,"scope":"global"},
        {"family":"inet6","local":"fe80::fc08:90ff:fee9:579d","prefixlen":64,"scope":"link"}]}]"#;

    #[test]
    fn network_has_the_addresses_of_the_pod_with_their_prefixes() {
        let addresses = ["10.1.2.3", "fd00::7"].map(|text| text.parse().unwrap());
        let device = Device::parse(DEVICE).unwrap();
        let network = device.network(&addresses, Vec::new(), Vec::new()).unwrap();
        let texts: Vec<_> = network.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.1.2.3/24", "fd00::7/64"]);
        assert_eq!((network.mtu, network.mac.to_string().as_str()), (1450, "fe:08:90:e9:57:9d"));
        let other = ["10.1.2.4".parse().unwrap()];
        let device = Device::parse(DEVICE).unwrap();
        assert!(device.network(&other, Vec::new(), Vec::new()).is_err());
        assert!(Device::parse(b"[]").is_err());
    }

    #[test]
    fn routes_on_the_link_come_first_with_those_of_the_kernel() {
        let routes = parse(
            br#"[{"dst":"default","gateway":"169.254.1.1","flags":[]},
            {"dst":"169.254.1.1","scope":"link","flags":[]},
            {"dst":"10.1.2.0/24","protocol":"kernel","scope":"link","prefsrc":"10.1.2.3"},
            {"type":"unreachable","dst":"10.9.0.0/16","flags":[]}]"#,
            V4,
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
                ("10.1.2.0/24".to_owned(), None),
                ("0.0.0.0/0".to_owned(), Some("169.254.1.1".to_owned()))
            ]
        );
        assert_eq!(parse(b"\n", V4).unwrap(), []);
        let routes = parse(
            br#"[{"dst":"fd00::/64","protocol":"kernel","metric":256,"flags":[]},
            {"dst":"fe80::/64","protocol":"kernel","metric":256,"flags":[]},
            {"type":"multicast","dst":"ff00::/8","protocol":"kernel","flags":[]}]"#,
            Ipv6Addr::UNSPECIFIED.into(),
        )
        .unwrap();
        let texts: Vec<_> = routes.iter().map(|route| route.destination.to_string()).collect();
        assert_eq!(texts, ["fd00::/64"]);
    }

    #[test]
    fn default_route_has_the_family_of_its_list() {
        for route in [
            &br#"[{"dst":"default","gateway":"fd00::1","protocol":"static"}]"#[..],
            br#"[{"dst":"default","metric":1024,"flags":[],"pref":"medium"}]"#,
        ] {
            let routes = parse(route, Ipv6Addr::UNSPECIFIED.into()).unwrap();
            assert_eq!(routes[0].destination.to_string(), "::/0");
        }
    }

    /// Verifies V8.
    #[test]
    fn route_keeps_its_mtu_and_on_link_flag() {
        let routes = parse(
            br#"[{"dst":"default","gateway":"10.9.9.9","flags":["onlink"],
            "metrics":[{"mtu":1450}]},
            {"dst":"10.5.0.0/16","scope":"link","flags":[],"metrics":[{"advmss":1400}]}]"#,
            V4,
        )
        .unwrap();
        let ways: Vec<_> =
            routes.iter().map(|route| (route.on_link, route.mtu.map(NonZeroU32::get))).collect();
        assert_eq!(ways, [(false, None), (true, Some(1450))]);
    }

    /// Verifies V8.
    #[test]
    fn neighbours_have_their_hardware_addresses() {
        let list = br#"[{"dst":"169.254.1.1","lladdr":"02:00:5e:00:53:01","state":["PERMANENT"]},
            {"dst":"fd00::1","state":["PERMANENT"]}]"#;
        let neighbours = parse_neighbours(list).unwrap();
        let expected = Neighbour {
            address: [169, 254, 1, 1].into(),
            mac: MacAddress([2, 0, 0x5e, 0, 0x53, 1]),
        };
        assert_eq!(neighbours, [expected]);
        assert_eq!(parse_neighbours(b"").unwrap(), []);
        let many = vec![expected; MAX_ENTRIES + 1];
        let refused = Device::parse(DEVICE).unwrap().network(&[], Vec::new(), many).unwrap_err();
        assert_eq!(refused.to_string(), "65 permanent neighbours; allowed are 64");
    }
}
