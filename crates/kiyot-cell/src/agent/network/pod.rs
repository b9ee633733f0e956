//! The pod's network on a machine of the cell's own: device, addresses, routes, and the name
//! servers of the cell's containerd.

use std::{fs, io, net::IpAddr, num::NonZeroU32, path::Path};

use kiyot_link::{
    bind_limits::{MAX_ENTRIES, MAX_ROUTES},
    mac_address::MacAddress,
};
use kiyot_linux::{
    link::{self, Via},
    netlink::route_socket,
};
use kiyot_proto::cell::PodNetwork;
use rustix::net::netdevice::name_to_index;
use tonic::Status;

use super::POD_DEVICE;

/// Smallest MTU of IPv4, and largest MTU of Linux.
const MTU_BYTES: std::ops::RangeInclusive<u32> = 68..=65_536;
/// File to which the image's /etc/resolv.conf links.
const RESOLV_CONF: &str = "/run/resolv.conf";

/// A validated network.
#[derive(Debug, PartialEq, Eq)]
struct Settings {
    mac: MacAddress,
    mtu: u32,
    addresses: Vec<(IpAddr, u8)>,
    /// False if the kernel adds the routes of the addresses' networks.
    has_all_routes: bool,
    routes: Vec<((IpAddr, u8), Via)>,
    neighbours: Vec<(IpAddr, MacAddress)>,
    resolv_conf: String,
}

/// Configures the pod's network. A repeated call changes nothing. Validates the whole request
/// before it changes anything.
pub fn configure(owns_machine: bool, network: &PodNetwork) -> Result<(), Status> {
    if !owns_machine {
        return Err(Status::failed_precondition(
            "pod network: can't be configured, the network of the cell is made by its provider",
        ));
    }
    let settings = Settings::parse(network)?;
    settings
        .apply(Path::new(RESOLV_CONF))
        .map_err(|(doing, error)| Status::internal(format!("cannot {doing}: {error}")))
}

impl Settings {
    fn parse(network: &PodNetwork) -> Result<Self, Status> {
        let PodNetwork {
            mac,
            mtu,
            addresses,
            routes,
            neighbours,
            name_servers,
            search,
            has_all_routes,
        } = network;
        let invalid = |what: &str, value: &str, allowed: &str| {
            Status::invalid_argument(format!("{what} {value:?}: invalid; allowed: {allowed}"))
        };
        for (what, entries, most) in [
            ("addresses", addresses.len(), MAX_ENTRIES),
            ("routes", routes.len(), MAX_ROUTES),
            ("neighbours", neighbours.len(), MAX_ENTRIES),
            ("name servers", name_servers.len(), MAX_ENTRIES),
            ("search domains", search.len(), MAX_ENTRIES),
        ] {
            if entries > most {
                let allowed = format!("at most {most}");
                return Err(invalid(what, &entries.to_string(), &allowed));
            }
        }
        let check_mtu = |what: &str, mtu: u32| {
            let allowed = format!("{} to {} bytes", MTU_BYTES.start(), MTU_BYTES.end());
            let is_allowed = MTU_BYTES.contains(&mtu);
            is_allowed.then_some(()).ok_or_else(|| invalid(what, &mtu.to_string(), &allowed))
        };
        check_mtu("MTU", *mtu)?;
        let network_of = |what: &str, text: &str| {
            parse_network(text).ok_or_else(|| invalid(what, text, "as 10.1.2.3/24"))
        };
        let address_of =
            |what: &str, text: &str| text.parse().map_err(|_| invalid(what, text, "an IP address"));
        let addresses =
            addresses.iter().map(|text| network_of("address", text)).collect::<Result<_, _>>()?;
        let route = |route: &kiyot_proto::cell::Route| {
            let gateway = (!route.gateway.is_empty())
                .then(|| address_of("gateway", &route.gateway))
                .transpose()?;
            let mtu = NonZeroU32::new(route.mtu);
            mtu.map_or(Ok(()), |mtu| check_mtu("MTU of a route", mtu.get()))?;
            let via = Via { gateway, on_link: route.on_link, mtu };
            Ok((network_of("route", &route.destination)?, via))
        };
        let routes = routes.iter().map(route).collect::<Result<_, Status>>()?;
        let mac_of =
            |what: &str, mac: &str| mac.parse().map_err(|_| invalid(what, mac, "six bytes"));
        let neighbour = |neighbour: &kiyot_proto::cell::Neighbour| {
            let address = address_of("neighbour", &neighbour.address)?;
            Ok((address, mac_of("MAC address of a neighbour", &neighbour.mac)?))
        };
        let neighbours = neighbours.iter().map(neighbour).collect::<Result<_, Status>>()?;
        let mut resolv_conf = String::new();
        for server in name_servers {
            let address: IpAddr = address_of("name server", server)?;
            resolv_conf.push_str(&format!("nameserver {address}\n"));
        }
        if let Some(domain) = search.iter().find(|domain| !is_domain(domain)) {
            return Err(invalid(
                "search domain",
                domain,
                "letters, digits, \".\", \"-\" and \"_\"",
            ));
        }
        if !search.is_empty() {
            resolv_conf.push_str(&format!("search {}\n", search.join(" ")));
        }
        let mac = mac_of("MAC address", mac)?;
        let (mtu, has_all_routes) = (*mtu, *has_all_routes);
        Ok(Self { mac, mtu, addresses, has_all_routes, routes, neighbours, resolv_conf })
    }

    fn apply(&self, resolv_conf: &Path) -> Result<(), (&'static str, io::Error)> {
        let step = |doing| move |error| (doing, error);
        let socket = route_socket().map_err(step("open netlink"))?;
        let index = name_to_index(&socket, POD_DEVICE)
            .map_err(|error| ("find the pod's device", error.into()))?;
        link::configure(&socket, index, self.mac.0, self.mtu)
            .map_err(step("set the pod's device up"))?;
        // In a repeated call, a sysctl of the pod may have disabled IPv6.
        let takes_v6 = !is_v6_disabled();
        let is_taken = |address: &IpAddr| takes_v6 || address.is_ipv4();
        for (address, prefix_len) in self.addresses.iter().filter(|(address, _)| is_taken(address))
        {
            link::set_address(&socket, index, *address, *prefix_len, !self.has_all_routes)
                .map_err(step("set the pod's address"))?;
        }
        for (destination, via) in self.routes.iter().filter(|((address, _), _)| is_taken(address)) {
            link::set_route(&socket, index, *destination, *via)
                .map_err(step("set a route of the pod"))?;
        }
        for (address, mac) in self.neighbours.iter().filter(|(address, _)| is_taken(address)) {
            link::set_neighbour(&socket, index, *address, mac.0)
                .map_err(step("set a neighbour of the pod"))?;
        }
        fs::write(resolv_conf, &self.resolv_conf).map_err(step("write resolv.conf"))
    }
}

/// Returns whether IPv6 is disabled on the pod's device.
fn is_v6_disabled() -> bool {
    let path = format!("/proc/sys/net/ipv6/conf/{POD_DEVICE}/disable_ipv6");
    fs::read_to_string(path).is_ok_and(|value| value.trim() != "0")
}

fn parse_network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix_len) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let prefix_len: u8 = prefix_len.parse().ok()?;
    (prefix_len <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, prefix_len))
}

fn is_domain(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=253).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use kiyot_proto::cell::{Neighbour, Route};
    use tonic::Code;

    use super::*;

    fn network() -> PodNetwork {
        PodNetwork {
            mac: "02:00:5e:00:53:01".into(),
            mtu: 1450,
            addresses: vec!["10.1.2.3/24".into(), "fd00::3/64".into()],
            routes: vec![
                Route { destination: "169.254.1.1/32".into(), ..Route::default() },
                Route {
                    destination: "0.0.0.0/0".into(),
                    gateway: "169.254.1.1".into(),
                    mtu: 1400,
                    on_link: true,
                },
            ],
            neighbours: vec![Neighbour {
                address: "169.254.1.1".into(),
                mac: "02:00:5e:00:53:02".into(),
            }],
            name_servers: vec!["10.0.0.10".into()],
            search: vec!["example.org".into()],
            has_all_routes: true,
        }
    }

    #[test]
    fn network_is_read() {
        let settings = Settings::parse(&network()).unwrap();
        assert_eq!(settings.mac, MacAddress([2, 0, 0x5e, 0, 0x53, 1]));
        assert_eq!(settings.addresses.len(), 2);
        let gateway = IpAddr::from([169, 254, 1, 1]);
        let via = Via { gateway: Some(gateway), on_link: true, mtu: NonZeroU32::new(1400) };
        assert_eq!(
            settings.routes,
            [((gateway, 32), Via::default()), ((IpAddr::from([0, 0, 0, 0]), 0), via)]
        );
        assert_eq!(settings.neighbours, [(gateway, MacAddress([2, 0, 0x5e, 0, 0x53, 2]))]);
        assert_eq!(settings.resolv_conf, "nameserver 10.0.0.10\nsearch example.org\n");
    }

    #[test]
    fn invalid_network_is_refused_by_name() {
        type Change = fn(&mut PodNetwork);
        let changes: [(Change, &str); 10] = [
            (|network| network.mac = "02:00".into(), "MAC address"),
            (|network| network.mtu = 0, "MTU"),
            (|network| network.addresses = vec!["10.1.2.3".into()], "address"),
            (|network| network.addresses = vec!["10.1.2.3/33".into()], "address"),
            (|network| network.routes[1].gateway = "there".into(), "gateway"),
            (|network| network.routes[1].mtu = 67, "MTU of a route"),
            (|network| network.neighbours[0].address = "there".into(), "neighbour"),
            (|network| network.neighbours[0].mac = "02:00".into(), "MAC address of a neighbour"),
            (|network| network.name_servers = vec!["a b".into()], "name server"),
            (|network| network.search = vec!["a\nb".into()], "search domain"),
        ];
        for (change, what) in changes {
            let mut changed = network();
            change(&mut changed);
            let status = Settings::parse(&changed).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().starts_with(what), "{status}");
        }
        let mut many = network();
        many.addresses = vec!["10.1.2.3/24".into(); MAX_ENTRIES + 1];
        assert!(Settings::parse(&many).unwrap_err().message().contains("at most 64"));
        let mut many = network();
        many.neighbours = vec![many.neighbours[0].clone(); MAX_ENTRIES + 1];
        assert!(Settings::parse(&many).unwrap_err().message().starts_with("neighbours"));
        let mut many = network();
        let route = many.routes[0].clone();
        many.routes = vec![route.clone(); MAX_ROUTES];
        assert_eq!(Settings::parse(&many).unwrap().routes.len(), MAX_ROUTES);
        many.routes.push(route);
        assert!(Settings::parse(&many).unwrap_err().message().contains("at most 256"));
    }

    #[test]
    fn network_of_the_provider_is_not_configured() {
        let status = configure(false, &network()).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
    }
}
