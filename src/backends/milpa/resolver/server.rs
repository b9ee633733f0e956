//! A name server's address, as a pod's configuration has it. Pure.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// A name server that means another machine in a cell than on the node: an address of the loopback,
/// of a link, or none in particular.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub(super) address: IpAddr,
    /// The zone of a link-local address, which only the node knows: the name or the number of a
    /// device; "" for none.
    pub(super) zone: String,
}

impl Server {
    /// The name server, if it is such a one. A resolver passes over what is no address.
    pub fn of_node(text: &str) -> Option<Self> {
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

    /// Its address where a zone is needed.
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
    fn they_are_known_by_their_addresses() {
        for (text, same) in [
            ("127.0.0.53", "127.0.0.53"),
            ("169.254.20.10", "169.254.20.10"),
            ("0.0.0.0", "0.0.0.0"),
            ("::1", "::1"),
            ("::", "::"),
            ("fe80::1%eth0", "fe80::1%eth0"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
        ] {
            let server = Server::of_node(text).unwrap();
            assert_eq!((server.to_string().as_str(), Server::of_node(same)), (same, Some(server)));
        }
        for other in ["1.1.1.1", "2001:db8::1", "not an address", "", "%"] {
            assert_eq!(Server::of_node(other), None, "{other}");
        }
    }
}
