//! Addresses of name servers in a pod's configuration. Pure.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// Name server whose address means another machine in a cell than on the node: a loopback,
/// link-local or unspecified address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub(super) address: IpAddr,
    /// Zone of a link-local address, which only the node knows: name or number of a device; may be
    /// empty.
    pub(super) zone: String,
}

impl Server {
    /// Parses the address of a name server; `None` if a cell can reach the server itself, or if the
    /// address is invalid. A resolver ignores invalid addresses, too.
    pub fn parse_node_only(text: &str) -> Option<Self> {
        let (address, zone) = text.split_once('%').unwrap_or((text, ""));
        let address = address.parse::<IpAddr>().ok()?.to_canonical();
        let of_node = match address {
            IpAddr::V4(address) => {
                address.is_loopback() || address.is_link_local() || address.is_unspecified()
            }
            IpAddr::V6(address) => {
                address.is_loopback() || address.is_unicast_link_local() || address.is_unspecified()
            }
        };
        of_node.then(|| Self { address, zone: zone.to_owned() })
    }

    /// Returns the address if it needs a zone.
    pub(super) fn link_local(&self) -> Option<Ipv6Addr> {
        match self.address {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if self.zone.is_empty() { Ok(()) } else { write!(f, "%{}", self.zone) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_name_servers_are_recognized_by_address() {
        for (text, same) in [
            ("127.0.0.53", "127.0.0.53"),
            ("169.254.20.10", "169.254.20.10"),
            ("0.0.0.0", "0.0.0.0"),
            ("::1", "::1"),
            ("::", "::"),
            ("fe80::1%eth0", "fe80::1%eth0"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
        ] {
            let server = Server::parse_node_only(text).unwrap();
            assert_eq!(
                (server.to_string().as_str(), Server::parse_node_only(same)),
                (same, Some(server))
            );
        }
        for other in ["1.1.1.1", "2001:db8::1", "not an address", "", "%"] {
            assert_eq!(Server::parse_node_only(other), None, "{other}");
        }
    }
}
