//! Host ports of cells (`hostPort`) that no CNI plugin maps.
//!
//! Traffic to a local address of the node, from other machines or from the node itself, is sent to
//! the cell's address of the same family. Traffic to 127.0.0.0/8 is not sent: it would need
//! `route_localnet`, which lets every cell reach services on the node's loopback.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use kiyot_engine::provider::{HostPort, InstanceId};
use serde_json::{Value, json};

use crate::{
    instance::Home,
    network::{
        conntrack,
        rules::{Chain, Family, RuleError, Rules, words},
    },
};

/// An error of host ports.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortError {
    #[error("{port} is taken by pod {pod} in {cell}; allowed: a port that no other pod has")]
    Taken { port: HostPort, pod: String, cell: String },
    #[error("{port} is taken by instance {cell}; allowed: a port that no other pod has")]
    TakenByInstance { port: HostPort, cell: String },
    #[error(
        "{0}: without a CNI plugin that maps ports, allowed are the node's addresses, except \
         127.0.0.0/8 and ::1"
    )]
    Address(HostPort),
    #[error(
        "{0}: the pod has no address of this family; allowed is an address of the node of the same \
         family as an address of the pod"
    )]
    NoAddress(HostPort),
    #[error(transparent)]
    Rule(#[from] RuleError),
}

/// The host ports of a cell.
#[derive(Debug)]
pub(super) struct Ports<'a> {
    /// The name of the cell or of its instance. At most 19 bytes, because the names of chains are
    /// limited.
    name: &'a str,
    /// The directory of an instance on this node; `None` on another machine.
    dir: Option<&'a Path>,
    ports: &'a [HostPort],
}

impl<'a> Ports<'a> {
    pub(super) fn new(home: &'a Home, ports: &'a [HostPort]) -> Self {
        Self { name: home.cell(), dir: Some(home.dir()), ports }
    }

    /// Returns the host ports of an instance on another machine.
    pub(super) fn of_remote(instance: &'a InstanceId, ports: &'a [HostPort]) -> Self {
        Self { name: &instance.0, dir: None, ports }
    }

    /// Checks whether the host ports can be mapped.
    pub(super) fn check(&self) -> Result<(), PortError> {
        let refused = self
            .ports
            .iter()
            .find(|port| port.host_ip.is_some_and(|ip| ip.to_canonical().is_loopback()));
        refused.map_or(Ok(()), |port| Err(PortError::Address(port.clone())))
    }

    /// Maps the host ports to the cell. `subnets` are the subnets of its link, in the form of
    /// `iptables`.
    pub(super) async fn open(
        &self,
        addresses: &[IpAddr],
        subnets: &[String],
    ) -> Result<(), PortError> {
        let nowhere = |port: &&HostPort| {
            !addresses
                .iter()
                .any(|address| port.host_ip.is_none_or(|ip| Family::of(&ip) == Family::of(address)))
        };
        if let Some(port) = self.ports.iter().find(nowhere) {
            return Err(PortError::NoAddress(port.clone()));
        }
        for family in Family::ALL {
            let address = addresses.iter().find(|address| Family::of(address) == family);
            let Some(address) = address.filter(|_| self.of(family).next().is_some()) else {
                continue;
            };
            self.rules(*address, subnets).create(self.dir).await?;
        }
        self.forget_flows().await;
        Ok(())
    }

    /// Returns the host ports of an address family.
    fn of(&self, family: Family) -> impl Iterator<Item = &HostPort> {
        self.ports
            .iter()
            .filter(move |port| port.host_ip.is_none_or(|ip| Family::of(&ip) == family))
    }

    /// Deletes conntrack entries, so that existing flows follow the current rules. A failure is
    /// only logged: the kernel drops the entries once the client pauses.
    pub(super) async fn forget_flows(&self) {
        let ports = self.ports.to_vec();
        match tokio::task::spawn_blocking(move || conntrack::forget(&ports)).await {
            Ok(Ok(flows)) => {
                tracing::debug!(cell = self.name, flows, "conntrack entries of host ports deleted")
            }
            Ok(Err(error)) => {
                tracing::warn!(
                    cell = self.name,
                    %error,
                    "conntrack entries of host ports not deleted"
                )
            }
            Err(error) => {
                tracing::error!(cell = self.name, %error, "conntrack thread panicked")
            }
        }
    }

    /// Removes the mapping. May be repeated.
    pub(super) async fn close(&self) -> Result<(), PortError> {
        if self.ports.is_empty() { Ok(()) } else { self.remove().await }
    }

    /// Removes the mapping in both families, even without known ports. May be repeated.
    pub(super) async fn remove(&self) -> Result<(), PortError> {
        // Only the names of the chains are needed: their content may be unknown after a crash.
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            self.rules(any, &[]).remove(self.dir).await?;
        }
        // Otherwise existing flows would continue to the next cell with this address.
        self.forget_flows().await;
        Ok(())
    }

    /// Maps the host ports to a cell on another machine, and masquerades connections that the
    /// node's rules, such as kube-proxy's, send to its address. Otherwise the cell would answer the
    /// client directly, from an address that the client did not call.
    pub(super) async fn open_remote(&self, address: IpAddr) -> Result<(), PortError> {
        if let Some(port) = self
            .ports
            .iter()
            .find(|port| port.host_ip.is_some_and(|ip| Family::of(&ip) != Family::of(&address)))
        {
            return Err(PortError::NoAddress(port.clone()));
        }
        let rules = self.rules(address, &everywhere());
        match rules.create(self.dir).await {
            // A previous daemon made the rules, and was killed before it recorded the attachment.
            Err(RuleError::Refused { .. }) => rules.ensure(self.dir).await?,
            outcome => outcome?,
        }
        self.forget_flows().await;
        Ok(())
    }

    /// Makes the absent rules of [`open_remote`](Self::open_remote).
    pub(super) async fn restore_remote(&self, address: IpAddr) -> Result<(), PortError> {
        let rules = self.rules(address, &everywhere());
        // A transaction makes all chains or nothing, so that present chains are whole.
        if rules.are_present(self.dir).await? {
            return Ok(());
        }
        rules.ensure(self.dir).await?;
        tracing::info!(instance = self.name, %address, "rules of an instance restored");
        self.forget_flows().await;
        Ok(())
    }

    /// Returns the rules for the family of `address`.
    fn rules(&self, address: IpAddr, subnets: &[String]) -> Rules {
        let family = Family::of(&address);
        let loopback = if family == Family::V4 { "127.0.0.0/8" } else { "::1/128" };
        let (to, back) = (format!("KIYOT-HP-{}", self.name), format!("KIYOT-HB-{}", self.name));
        let mapped = self.of(family).map(|port| {
            let at = port.host_ip.map(|ip| format!(" -d {ip}")).unwrap_or_default();
            let (protocol, from, into) = (
                port.protocol.name(),
                port.host_port,
                SocketAddr::new(address, port.container_port),
            );
            words(&format!("{to}{at} -p {protocol} --dport {from} -j DNAT --to-destination {into}"))
        });
        // Without masquerading, the cell would answer a neighbour on its link directly, and the
        // neighbour would drop the answer.
        let of_family = |subnet: &&String| (family == Family::V6) == subnet.contains(':');
        let neighbours = subnets
            .iter()
            .filter(of_family)
            .map(|subnet| words(&format!("{back} -s {subnet} -d {address} -j MASQUERADE")));
        let jumps = vec![
            words(&format!("PREROUTING -m addrtype --dst-type LOCAL -j {to}")),
            words(&format!("OUTPUT ! -d {loopback} -m addrtype --dst-type LOCAL -j {to}")),
        ];
        let jumps_back = vec![words(&format!("POSTROUTING -m conntrack --ctstate DNAT -j {back}"))];
        let (content, content_back) = (mapped.collect(), neighbours.collect());
        Rules {
            family,
            table: "nat",
            chains: vec![
                Chain { name: to, jumps, content },
                Chain { name: back, jumps: jumps_back, content: content_back },
            ],
        }
    }
}

/// Returns subnets that contain all neighbours of a cell on another machine.
fn everywhere() -> [String; 2] {
    ["0.0.0.0/0".to_owned(), "::/0".to_owned()]
}

/// Returns the `portMappings` argument of CNI plugins (CNI conventions).
pub(super) fn mappings(ports: &[HostPort]) -> Value {
    let one = |port: &HostPort| {
        let ip = port.host_ip.map(|ip| ip.to_string()).unwrap_or_default();
        json!({
            "hostPort": port.host_port,
            "containerPort": port.container_port,
            "protocol": port.protocol.name(),
            "hostIP": ip
        })
    };
    ports.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use kiyot_engine::{id::CellId, provider::Protocol};

    use super::*;

    fn port(host_port: u16, host_ip: Option<&str>) -> HostPort {
        HostPort {
            protocol: Protocol::Tcp,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port,
            container_port: 80,
        }
    }

    #[test]
    fn chains_are_named_by_the_cell() {
        let home = Home::new(std::path::Path::new("/x"), &CellId::mint().unwrap());
        let ports = [port(8080, None), port(8081, Some("10.0.0.1"))];
        let ports = Ports::new(&home, &ports);
        let made =
            ports.rules([10, 9, 8, 7].into(), &["10.9.8.0/24".to_owned(), "fd00::/64".to_owned()]);
        let [to, back] = &made.chains[..] else { panic!("{made:?}") };
        let chain = format!("KIYOT-HP-{}", home.cell());
        assert!(chain.len() <= 28, "longer than iptables allows: {chain}");
        assert_eq!(
            to.content[0].join(" "),
            format!("{chain} -p tcp --dport 8080 -j DNAT --to-destination 10.9.8.7:80")
        );
        assert_eq!(
            to.content[1].join(" "),
            format!("{chain} -d 10.0.0.1 -p tcp --dport 8081 -j DNAT --to-destination 10.9.8.7:80")
        );
        let to_remove = ports.rules(Ipv4Addr::UNSPECIFIED.into(), &[]);
        assert_eq!(back.content.len(), 1, "{back:?}");
        assert_eq!(
            [&to_remove.chains[0].jumps, &to_remove.chains[1].jumps],
            [&to.jumps, &back.jumps],
            "a removal repeats the words of the creation"
        );
        let made = ports
            .rules("fd00::7".parse().unwrap(), &["10.9.8.0/24".to_owned(), "fd00::/64".to_owned()]);
        let [to, back] = &made.chains[..] else { panic!("{made:?}") };
        let mapped: Vec<_> = to.content.iter().map(|rule| rule.join(" ")).collect();
        assert_eq!(
            mapped,
            [format!("{chain} -p tcp --dport 8080 -j DNAT --to-destination [fd00::7]:80")],
            "10.0.0.1 is of the other family"
        );
        assert_eq!((back.content.len(), made.family), (1, Family::V6));
    }

    #[test]
    fn error_names_the_invalid_address() {
        let home = Home::new(std::path::Path::new("/x"), &CellId::mint().unwrap());
        for ip in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            let error = Ports::new(&home, &[port(8080, Some(ip))]).check().unwrap_err().to_string();
            assert!(error.contains(ip) && error.contains("8080/tcp"), "{error}");
        }
        assert!(
            Ports::new(
                &home,
                &[port(1, None), port(2, Some("10.0.0.1")), port(3, Some("2001:db8::1"))]
            )
            .check()
            .is_ok()
        );
    }

    /// Verifies N11.
    #[tokio::test]
    async fn host_port_of_a_family_without_pod_address_is_refused() {
        let home = Home::new(std::path::Path::new("/x"), &CellId::mint().unwrap());
        for (ip, address) in [("10.0.0.1", "fd00::7"), ("2001:db8::1", "10.9.8.7")] {
            let ports = [port(8080, Some(ip))];
            let error = Ports::new(&home, &ports)
                .open(&[address.parse().unwrap()], &[])
                .await
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(ip) && error.contains("8080/tcp") && error.contains("family"),
                "{error}"
            );
        }
        assert!(Ports::new(&home, &[port(1, None)]).open(&[], &[]).await.is_err());
    }

    /// Verifies N5.
    #[test]
    fn host_ports_collide_by_number_protocol_and_address() {
        let udp = HostPort { protocol: Protocol::Udp, ..port(1, None) };
        assert!(port(1, None).overlaps(&port(1, Some("10.0.0.1"))));
        assert!(!port(1, Some("10.0.0.2")).overlaps(&port(1, Some("10.0.0.1"))));
        assert!(!port(1, None).overlaps(&port(2, None)) && !port(1, None).overlaps(&udp));
    }

    #[test]
    fn port_mappings_follow_the_cni_conventions() {
        let told = mappings(&[port(8080, None)]);
        assert_eq!(
            told,
            json!([{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "" }])
        );
    }
}
