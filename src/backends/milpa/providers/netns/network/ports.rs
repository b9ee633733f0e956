//! Ports of the node that lead to cells (`hostPort`), where no CNI plugin maps them.
//!
//! What comes to a local address of the node, from elsewhere or from the node itself, goes on to the cell. Not so to 127.0.0.0/8: that would need
//! `route_localnet`, by which every cell could reach what listens on the node's loopback only.

use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Value, json};

use super::{
    super::{super::HostPort, command::CommandError, instance::Home},
    rules::{Rules, words},
};

/// Why a cell's ports can't be.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum PortError {
    #[error("{port} is taken by pod {pod} in {cell}; allowed is a port that no other pod has")]
    Taken { port: HostPort, pod: String, cell: String },
    #[error("{0}: without a CNI plugin that maps ports, allowed are IPv4 addresses of the node, and none of 127.0.0.0/8")]
    Address(HostPort),
    #[error("the cell has no IPv4 address that {0} could lead to")]
    NoAddress(HostPort),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// The rules of a cell's ports.
#[derive(Debug)]
pub(super) struct Ports<'a> {
    home: &'a Home,
    ports: &'a [HostPort],
}

impl<'a> Ports<'a> {
    pub(super) fn new(home: &'a Home, ports: &'a [HostPort]) -> Self {
        Self { home, ports }
    }

    /// Says whether rules can be made of them.
    pub(super) fn check(&self) -> Result<(), PortError> {
        let bad = |ip: &IpAddr| !ip.is_ipv4() || ip.is_loopback();
        let refused = self.ports.iter().find(|port| port.host_ip.as_ref().is_some_and(bad));
        refused.map_or(Ok(()), |port| Err(PortError::Address(port.clone())))
    }

    /// Makes them lead to the cell. `subnets` are those of its link, as `iptables` writes them.
    pub(super) async fn open(&self, addresses: &[IpAddr], subnets: &[String]) -> Result<(), PortError> {
        let Some(first) = self.ports.first() else { return Ok(()) };
        let address = addresses.iter().find_map(|address| if let IpAddr::V4(address) = address { Some(*address) } else { None });
        let address = address.ok_or_else(|| PortError::NoAddress(first.clone()))?;
        for rules in self.rules(address, subnets) {
            rules.add(Some(self.home.dir())).await?;
        }
        Ok(())
    }

    /// Makes them lead nowhere. Done already is fine.
    pub(super) async fn close(&self) -> Result<(), PortError> {
        if !self.ports.is_empty() {
            // What is in the chains is of no interest any more, and after a crash it may not be known.
            for rules in self.rules(Ipv4Addr::UNSPECIFIED, &[]) {
                rules.remove(Some(self.home.dir())).await?;
            }
        }
        Ok(())
    }

    fn rules(&self, address: Ipv4Addr, subnets: &[String]) -> [Rules; 2] {
        let (to, back) = (format!("KIYOT-HP-{}", self.home.cell()), format!("KIYOT-HB-{}", self.home.cell()));
        let mapped = self.ports.iter().map(|port| {
            let at = port.host_ip.map(|ip| format!(" -d {ip}")).unwrap_or_default();
            let (protocol, from, into) = (port.protocol.name(), port.host_port, port.container_port);
            words(&format!("{to}{at} -p {protocol} --dport {from} -j DNAT --to-destination {address}:{into}"))
        });
        // A neighbour on the link would get the answer past the node, and not know it.
        let neighbours = subnets.iter().map(|subnet| words(&format!("{back} -s {subnet} -d {address} -j MASQUERADE")));
        [
            Rules {
                table: "nat",
                chain: to.clone(),
                jumps: vec![
                    words(&format!("PREROUTING -m addrtype --dst-type LOCAL -j {to}")),
                    words(&format!("OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j {to}")),
                ],
                content: mapped.collect(),
            },
            Rules {
                table: "nat",
                chain: back.clone(),
                jumps: vec![words(&format!("POSTROUTING -m conntrack --ctstate DNAT -j {back}"))],
                content: neighbours.collect(),
            },
        ]
    }
}

/// What a CNI plugin that maps ports is told (CNI conventions, "portMappings").
pub(super) fn mappings(ports: &[HostPort]) -> Value {
    let one = |port: &HostPort| {
        let ip = port.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
        json!({ "hostPort": port.host_port, "containerPort": port.container_port, "protocol": port.protocol.name(), "hostIP": ip })
    };
    ports.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::super::super::{super::id::CellId, Protocol},
        *,
    };

    fn port(host_port: u16, host_ip: Option<&str>) -> HostPort {
        HostPort { protocol: Protocol::Tcp, host_ip: host_ip.map(|ip| ip.parse().unwrap()), host_port, container_port: 80 }
    }

    #[test]
    fn rules_are_found_by_the_cell_alone() {
        let home = Home::new(std::path::Path::new("/x"), &CellId::mint().unwrap());
        let ports = [port(8080, None), port(8081, Some("10.0.0.1"))];
        let ports = Ports::new(&home, &ports);
        let [to, back] = ports.rules(Ipv4Addr::new(10, 9, 8, 7), &["10.9.8.0/24".to_owned()]);
        let chain = format!("KIYOT-HP-{}", home.cell());
        assert!(chain.len() <= 28, "iptables takes no longer name of a chain: {chain}");
        assert_eq!(to.content[0].join(" "), format!("{chain} -p tcp --dport 8080 -j DNAT --to-destination 10.9.8.7:80"));
        assert_eq!(to.content[1].join(" "), format!("{chain} -d 10.0.0.1 -p tcp --dport 8081 -j DNAT --to-destination 10.9.8.7:80"));
        let [to_remove, back_to_remove] = ports.rules(Ipv4Addr::UNSPECIFIED, &[]);
        assert_eq!((to_remove.jumps, back_to_remove.jumps), (to.jumps, back.jumps), "they are taken away by the same words");
    }

    #[test]
    fn addresses_that_can_not_be_are_named() {
        let home = Home::new(std::path::Path::new("/x"), &CellId::mint().unwrap());
        for ip in ["127.0.0.1", "::1", "2001:db8::1"] {
            let error = Ports::new(&home, &[port(8080, Some(ip))]).check().unwrap_err().to_string();
            assert!(error.contains(ip) && error.contains("8080/tcp"), "{error}");
        }
        assert!(Ports::new(&home, &[port(1, None), port(2, Some("10.0.0.1"))]).check().is_ok());
    }

    #[test]
    fn ports_meet_by_number_protocol_and_address() {
        let udp = HostPort { protocol: Protocol::Udp, ..port(1, None) };
        assert!(port(1, None).overlaps(&port(1, Some("10.0.0.1"))));
        assert!(!port(1, Some("10.0.0.2")).overlaps(&port(1, Some("10.0.0.1"))));
        assert!(!port(1, None).overlaps(&port(2, None)) && !port(1, None).overlaps(&udp));
    }

    #[test]
    fn plugins_are_told_as_the_conventions_say() {
        let told = mappings(&[port(8080, None)]);
        assert_eq!(told, json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "" }]));
    }
}
