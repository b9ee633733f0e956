//! `[backends.NAME.gateway]`: the TCP port that cells on other machines dial.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use kiyot_values::problems::{Field, Problem, Report, Table};

use super::read;

const MAX_UNAUTHENTICATED_PER_PEER: usize = 16;
/// Highest value of `max_unauthenticated_per_peer`: half of the total limit.
const MAX_UNAUTHENTICATED_PER_PEER_LIMIT: usize = 256;
const IPV6_PEER_BITS: u8 = 64;

/// The TCP port that cells on other machines dial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayListen {
    /// Address to listen on. Without it no TCP port is open.
    pub listen: Option<SocketAddr>,
    /// Address that cells dial; by default `listen`.
    pub advertise: Option<Advertise>,
    /// Limit of the unauthenticated connections of each peer.
    pub max_unauthenticated_per_peer: usize,
    /// Length in bits of the IPv6 prefix that identifies a peer.
    pub ipv6_peer_bits: u8,
    /// Program `kiyot-cell` that cells download. By default the one beside kiyot, otherwise
    /// `/usr/libexec/kiyot/kiyot-cell`.
    pub agent: Option<PathBuf>,
}

/// Address that cells dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advertise {
    /// An address, with the port of `listen`.
    Address(IpAddr),
    /// An address and a port, of a forwarder.
    Endpoint(SocketAddr),
}

impl Default for GatewayListen {
    fn default() -> Self {
        Self {
            listen: None,
            advertise: None,
            max_unauthenticated_per_peer: MAX_UNAUTHENTICATED_PER_PEER,
            ipv6_peer_bits: IPV6_PEER_BITS,
            agent: None,
        }
    }
}

impl GatewayListen {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut gateway = Self::default();
        table.set("listen", &mut gateway.listen, |field| listen(field).map(Some));
        table.set("advertise", &mut gateway.advertise, |field| advertise(field).map(Some));
        table.set(
            "max_unauthenticated_per_peer",
            &mut gateway.max_unauthenticated_per_peer,
            |field| field.number(1..=MAX_UNAUTHENTICATED_PER_PEER_LIMIT),
        );
        table.set("ipv6_peer_bits", &mut gateway.ipv6_peer_bits, |field| field.number(32..=128));
        table.set("agent", &mut gateway.agent, |field| read::path(field).map(Some));
        table.finish();
        gateway
    }

    /// Returns the address that cells dial; `None` without a TCP port, or if the address is
    /// unknown.
    pub fn advertised(&self) -> Option<SocketAddr> {
        let listen = self.listen?;
        match self.advertise {
            Some(Advertise::Endpoint(endpoint)) => Some(endpoint),
            Some(Advertise::Address(address)) => Some(SocketAddr::new(address, listen.port())),
            None => (!listen.ip().is_unspecified()).then_some(listen),
        }
    }

    /// Returns whether cells dial a forwarder.
    pub fn is_forwarded(&self) -> bool {
        matches!(self.advertise, Some(Advertise::Endpoint(_)))
    }

    /// Returns the IPv4 address of the node that cells dial; `None` if unknown, such as behind a
    /// forwarder.
    pub fn node_address(&self) -> Option<Ipv4Addr> {
        match self.advertised().filter(|_| !self.is_forwarded())?.ip() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// Returns a warning if only this machine can dial the advertised address.
    pub fn warning(&self) -> Option<String> {
        let advertised = self.advertised().filter(|advertised| advertised.ip().is_loopback())?;
        Some(format!(
            "gateway: {advertised} is a loopback address, which no other machine can dial"
        ))
    }

    /// Reports keys that contradict each other or that the provider needs. `at` is the table's
    /// path.
    pub(super) fn check(&self, at: &str, cells_are_remote: bool, report: &Report) {
        if self.listen.is_none() && cells_are_remote {
            let rule = "is missing; the provider's cells are on other machines, which dial it: \
                        an IP address and a port, such as \"10.0.0.5:7700\"";
            report.add(Problem::new(format!("{at}.listen"), rule));
        }
        if self.listen.is_none() && self.advertise.is_some() {
            let rule = "has no effect without listen; allowed: with listen";
            report.add(Problem::new(format!("{at}.advertise"), rule));
        }
        if let (Some(listen), None) = (self.listen, self.advertised()) {
            let rule = format!(
                "is missing; listen = \"{listen}\" is every address of the node, and cells need \
                 one of them: an IP address, or an IP address and a port"
            );
            report.add(Problem::new(format!("{at}.advertise"), rule));
        }
    }
}

/// Reads the address to listen on. Port 0 is refused: the port would change at a restart, and
/// existing cells would not know it.
fn listen(field: Field<'_>) -> Option<SocketAddr> {
    let allowed = "an IP address of the node and a port, such as \"10.0.0.5:7700\", \
                   \"0.0.0.0:7700\" or \"[::]:7700\"";
    field.read(allowed, |text| {
        let address: SocketAddr = text.parse().ok()?;
        let is_allowed = address.ip().is_unspecified() || is_dialable(address.ip());
        (is_allowed && address.port() != 0).then_some(address)
    })
}

fn advertise(field: Field<'_>) -> Option<Advertise> {
    let allowed = "an IP address that cells can dial, with or without a port, such as \
                   \"10.0.0.5\" or \"10.0.0.5:7700\"";
    field.read(allowed, |text| {
        let (advertise, address, port) = match text.parse::<SocketAddr>() {
            Ok(endpoint) => (Advertise::Endpoint(endpoint), endpoint.ip(), Some(endpoint.port())),
            Err(_) => {
                let address: IpAddr = text.parse().ok()?;
                (Advertise::Address(address), address, None)
            }
        };
        (is_dialable(address) && port != Some(0)).then_some(advertise)
    })
}

/// Returns whether an address is that of a single machine. A link-local IPv6 address is ambiguous
/// without a device.
fn is_dialable(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(address) => address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_unspecified() && !address.is_multicast() && !is_local
}

#[cfg(test)]
mod tests {
    use crate::{BackendConfig, Config, Diff, GatewayListen, parse};

    const HEAD: &str = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\n\
                        type = \"milpa\"\n[backends.milpa.gateway]\n";

    fn parsed(keys: &str) -> Result<Config, Vec<String>> {
        parse("test.toml", &format!("{HEAD}{keys}"), [])
            .map_err(|problems| problems.list.iter().map(ToString::to_string).collect())
    }

    fn gateway(keys: &str) -> GatewayListen {
        let config = parsed(keys).unwrap();
        let Some(BackendConfig::Milpa(milpa)) = config.backends.get("milpa") else {
            panic!("no milpa in {config:?}")
        };
        milpa.gateway.clone()
    }

    /// Verifies C10.
    #[test]
    fn port_is_closed_by_default() {
        assert_eq!((gateway("").listen, gateway("").advertised()), (None, None));
    }

    #[test]
    fn advertised_address_defaults_to_the_address_and_port_of_listen() {
        for (keys, advertised) in [
            ("listen = \"10.0.0.5:7700\"", "10.0.0.5:7700"),
            ("listen = \"0.0.0.0:7700\"\nadvertise = \"10.0.0.5\"", "10.0.0.5:7700"),
            ("listen = \"[::]:7700\"\nadvertise = \"2001:db8::5\"", "[2001:db8::5]:7700"),
            ("listen = \"10.0.0.5:7700\"\nadvertise = \"192.0.2.1:443\"", "192.0.2.1:443"),
            ("listen = \"[::]:7700\"\nadvertise = \"[2001:db8::5]:443\"", "[2001:db8::5]:443"),
        ] {
            assert_eq!(gateway(keys).advertised(), Some(advertised.parse().unwrap()), "{keys}");
            assert_eq!(gateway(keys).warning(), None, "{keys}");
        }
        let warning = gateway("listen = \"127.0.0.1:7700\"").warning().unwrap();
        assert!(warning.contains("127.0.0.1:7700 is a loopback address"), "{warning}");
    }

    /// Verifies C10.
    #[test]
    fn unusable_addresses_are_problems_by_key_and_value() {
        for (keys, problem) in [
            ("listen = \"10.0.0.5\"", "listen = \"10.0.0.5\": is invalid; allowed: an IP address"),
            ("listen = \"10.0.0.5:0\"", "listen = \"10.0.0.5:0\": is invalid"),
            ("listen = \"node:7700\"", "listen = \"node:7700\": is invalid"),
            ("listen = \"224.0.0.1:7700\"", "listen = \"224.0.0.1:7700\": is invalid"),
            ("listen = \"[fe80::1]:7700\"", "listen = \"[fe80::1]:7700\": is invalid"),
            (
                "listen = \"0.0.0.0:7700\"",
                "advertise: is missing; listen = \"0.0.0.0:7700\" is every",
            ),
            ("listen = \"[::]:7700\"", "advertise: is missing"),
            ("advertise = \"10.0.0.5\"", "advertise: has no effect without listen"),
            (
                "listen = \"10.0.0.5:7700\"\nadvertise = \"0.0.0.0\"",
                "advertise = \"0.0.0.0\": is invalid; allowed: an IP address that cells can dial",
            ),
            (
                "listen = \"10.0.0.5:7700\"\nadvertise = \"[ff02::1]:7700\"",
                "advertise = \"[ff02::1]:7700\": is invalid",
            ),
            (
                "listen = \"10.0.0.5:7700\"\nadvertise = \"255.255.255.255\"",
                "advertise = \"255.255.255.255\": is invalid",
            ),
            (
                "listen = \"10.0.0.5:7700\"\nadvertise = \"10.0.0.5:0\"",
                "advertise = \"10.0.0.5:0\": is invalid",
            ),
            ("max_unauthenticated_per_peer = 0", "max_unauthenticated_per_peer = 0: is invalid"),
            ("ipv6_peer_bits = 129", "ipv6_peer_bits = 129: is invalid"),
        ] {
            let found = parsed(keys).unwrap_err();
            let problem = format!("backends.milpa.gateway.{problem}");
            assert!(
                found.len() == 1 && found[0].starts_with(&problem),
                "{keys}: {found:#?} instead of {problem}"
            );
        }
    }

    /// Verifies C10.
    #[test]
    fn provider_with_remote_cells_needs_a_port() {
        let found = |keys: &str, cells_are_remote| {
            let report = kiyot_values::problems::Report::default();
            gateway(keys).check("backends.milpa.gateway", cells_are_remote, &report);
            report.finish("test", ()).map_err(|problems| problems.to_string())
        };
        assert_eq!(found("", false), Ok(()));
        let problem = found("", true).unwrap_err();
        assert!(
            problem.starts_with("test: backends.milpa.gateway.listen: is missing"),
            "{problem}"
        );
        assert_eq!(found("listen = \"10.0.0.5:7700\"", true), Ok(()));
    }

    /// Verifies R4.
    #[test]
    fn changes_need_a_restart_and_are_named_by_key() {
        let (old, new) = (
            parsed("listen = \"10.0.0.5:7700\"").unwrap(),
            parsed("listen = \"0.0.0.0:7700\"\nadvertise = \"10.0.0.5\"\nipv6_peer_bits = 128")
                .unwrap(),
        );
        let diff = Diff::between(&old, &new);
        let named: Vec<_> = diff.restart.iter().map(|change| change.at.as_str()).collect();
        assert_eq!(
            named,
            ["listen", "advertise", "ipv6_peer_bits"]
                .map(|key| format!("backends.milpa.gateway.{key}"))
        );
        assert_eq!(diff.live, []);
        assert_eq!(old.reloaded(&new, "test"), Ok(old.clone()));
    }
}
