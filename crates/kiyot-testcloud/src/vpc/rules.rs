//! The rules of the VPC: source/destination checks and security groups, as input of
//! `ebtables-restore` and `iptables-restore`.

use std::{collections::BTreeMap, fmt::Write};

use super::NAT_LINK;

/// The broadcast address, to which the DHCP service answers.
const BROADCAST: &str = "255.255.255.255";

/// The network interface of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    /// The link on the bridge of its subnet, at most 14 characters.
    pub(crate) link: String,
    pub(crate) mac: String,
    /// The bridge of its subnet.
    pub(crate) bridge: String,
    /// Private addresses, the primary address first.
    pub(crate) addresses: Vec<String>,
    /// True if the source/destination check is on.
    pub(crate) is_checked: bool,
    /// Ids of its security groups.
    pub(crate) groups: Vec<String>,
}

/// The other end of permitted packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Addresses, such as `10.77.0.0/16`.
    Network(String),
    /// The ports with a security group, by its id.
    Group(String),
}

/// A permission of a security group (`IpPermission`) for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permission {
    /// Name or number of the protocol; `None` for all protocols.
    pub(crate) protocol: Option<String>,
    /// First and last port of TCP or UDP; `None` for all ports.
    pub(crate) ports: Option<(u16, u16)>,
    pub(crate) peer: Peer,
}

/// The permissions of a security group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) ingress: Vec<Permission>,
    pub(crate) egress: Vec<Permission>,
}

/// A route of the VPC to an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// Addresses, such as `10.8.1.0/24`.
    pub(crate) network: String,
    pub(crate) instance: String,
}

/// The ports of the VPC and what bounds their packets.
#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Ports by instance id.
    pub(crate) ports: BTreeMap<String, Port>,
    /// Security groups by id.
    pub(crate) groups: BTreeMap<String, Group>,
    pub(crate) routes: Vec<Route>,
}

impl Network {
    /// Returns the rules of frames. The VPC answers ARP itself and has no multicast. Of a checked
    /// port it takes only the port's own addresses, and it sends only these to the port.
    pub(crate) fn of_frames(&self) -> String {
        let mut filter = "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n".to_owned();
        let mut nat = "*nat\n:PREROUTING ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\n".to_owned();
        for Port { link, .. } in self.ports.values() {
            let _ = writeln!(filter, ":to-{link} RETURN");
            let _ = writeln!(nat, ":of-{link} RETURN");
        }
        filter += "-A FORWARD -p ARP -j DROP\n-A FORWARD -d Multicast -j DROP\n\
                   -A FORWARD -p IPv6 -j DROP\n";
        for Port { link, mac, addresses, is_checked, .. } in self.ports.values() {
            let _ = writeln!(nat, "-A PREROUTING -i {link} -j of-{link}");
            let _ = writeln!(nat, "-A of-{link} -s ! {mac} -j DROP");
            if !is_checked {
                continue;
            }
            for chain in ["FORWARD", "OUTPUT"] {
                let _ = writeln!(filter, "-A {chain} -o {link} -j to-{link}");
            }
            for address in addresses {
                let _ = writeln!(nat, "-A of-{link} -p IPv4 --ip-src {address} -j RETURN");
                let _ = writeln!(filter, "-A to-{link} -p IPv4 --ip-dst {address} -j RETURN");
            }
            let _ = writeln!(
                nat,
                "-A of-{link} -p IPv4 --ip-src 0.0.0.0 --ip-dst {BROADCAST} -j RETURN"
            );
            let _ = writeln!(filter, "-A to-{link} -p IPv4 --ip-dst {BROADCAST} -j RETURN");
            let _ = writeln!(nat, "-A of-{link} -p IPv4 -j DROP");
            let _ = writeln!(filter, "-A to-{link} -p IPv4 -j DROP");
        }
        filter + &nat
    }

    /// Returns the rules of packets. A packet passes the security groups of the port that sends it,
    /// then those of the port that gets it, unless it belongs to a connection that has passed.
    pub(crate) fn of_packets(&self) -> String {
        let mut rules = "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n".to_owned();
        for Port { link, .. } in self.ports.values() {
            let _ = writeln!(rules, ":of-{link} -\n:to-{link} -");
        }
        rules += "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n";
        for Port { link, .. } in self.ports.values() {
            let _ = writeln!(rules, "-A FORWARD -m physdev --physdev-in {link} -j of-{link}");
        }
        for (id, Port { link, addresses, .. }) in &self.ports {
            let routed = self.routes.iter().filter(|route| route.instance == *id);
            for to in addresses.iter().chain(routed.map(|route| &route.network)) {
                let _ = writeln!(rules, "-A FORWARD -d {to} -j to-{link}");
            }
            let bridged = format!("--physdev-is-bridged --physdev-out {link}");
            let _ = writeln!(rules, "-A FORWARD -m physdev {bridged} -j to-{link}");
        }
        for Port { link, groups, .. } in self.ports.values() {
            for group in groups.iter().filter_map(|group| self.groups.get(group)) {
                self.permit(&mut rules, &format!("of-{link} "), "-d", &group.egress);
                self.permit(&mut rules, &format!("to-{link} "), "-s", &group.ingress);
            }
            let _ = writeln!(rules, "-A of-{link} -j DROP\n-A to-{link} -j DROP");
        }
        rules += "COMMIT\n*nat\n:POSTROUTING ACCEPT\n";
        let _ = writeln!(rules, "-A POSTROUTING -o {NAT_LINK} -j MASQUERADE\nCOMMIT");
        rules
    }

    /// Adds the rules of permissions to a chain. `side` is `-s` or `-d`, the side of the peers.
    fn permit(&self, rules: &mut String, chain: &str, side: &str, permissions: &[Permission]) {
        for Permission { protocol, ports, peer } in permissions {
            let mut kind = String::new();
            if let Some(protocol) = protocol {
                let _ = write!(kind, "-p {protocol} ");
            }
            if let Some((first, last)) = ports {
                let _ = write!(kind, "--dport {first}:{last} ");
            }
            let of_group = |group: &String| {
                let ports = self.ports.values().filter(|port| port.groups.contains(group));
                ports.flat_map(|port| port.addresses.clone()).collect()
            };
            let peers: Vec<String> = match peer {
                Peer::Network(network) => vec![network.clone()],
                Peer::Group(group) => of_group(group),
            };
            for peer in peers {
                let _ = writeln!(rules, "-A {chain}{side} {peer} {kind}-j RETURN");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(link: &str, addresses: &[&str], is_checked: bool, group: &str) -> Port {
        Port {
            link: link.to_owned(),
            mac: "02:00:00:00:00:01".to_owned(),
            bridge: "subnet0".to_owned(),
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
            is_checked,
            groups: vec![group.to_owned()],
        }
    }

    fn network() -> Network {
        let group = Group {
            ingress: vec![
                Permission {
                    protocol: Some("tcp".to_owned()),
                    ports: Some((80, 81)),
                    peer: Peer::Group("sg-node".to_owned()),
                },
                Permission {
                    protocol: None,
                    ports: None,
                    peer: Peer::Network("10.0.0.0/8".to_owned()),
                },
            ],
            egress: Vec::new(),
        };
        Network {
            ports: BTreeMap::from([
                ("i-1".to_owned(), port("ve1", &["10.77.0.4", "10.77.0.5"], true, "sg-cell")),
                ("i-2".to_owned(), port("ve2", &["10.77.0.9"], false, "sg-node")),
            ]),
            groups: BTreeMap::from([("sg-cell".to_owned(), group)]),
            routes: vec![Route { network: "10.8.1.0/24".to_owned(), instance: "i-2".to_owned() }],
        }
    }

    #[test]
    fn checked_port_has_its_own_addresses_alone() {
        let rules = network().of_frames();
        for expected in [
            "-A of-ve1 -p IPv4 --ip-src 10.77.0.5 -j RETURN",
            "-A of-ve1 -p IPv4 -j DROP",
            "-A to-ve1 -p IPv4 --ip-dst 10.77.0.4 -j RETURN",
            "-A to-ve1 -p IPv4 -j DROP",
            "-A of-ve2 -s ! 02:00:00:00:00:01 -j DROP",
        ] {
            assert!(rules.lines().any(|line| line == expected), "{expected}: {rules}");
        }
        assert!(!rules.contains("-A of-ve2 -p IPv4"), "{rules}");
    }

    #[test]
    fn group_as_a_peer_means_the_addresses_of_its_ports() {
        let rules = network().of_packets();
        for expected in [
            "-A to-ve1 -s 10.77.0.9 -p tcp --dport 80:81 -j RETURN",
            "-A to-ve1 -s 10.0.0.0/8 -j RETURN",
            "-A to-ve1 -j DROP",
            "-A of-ve1 -j DROP",
            "-A FORWARD -d 10.8.1.0/24 -j to-ve2",
        ] {
            assert!(rules.lines().any(|line| line == expected), "{expected}: {rules}");
        }
    }
}
