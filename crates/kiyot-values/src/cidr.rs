//! IP networks.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

/// IP network such as `10.200.0.0/16`, without host bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    /// Network address.
    pub address: IpAddr,
    /// Length of the prefix, in bits.
    pub prefix: u8,
}

/// Error of a text that is not a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is invalid; allowed: a network such as 10.0.0.0/8 or fd00::/8, without host bits")]
pub struct NotACidr;

impl Cidr {
    /// Returns an IPv4 network. The caller guarantees that no host bit is set.
    pub const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Self {
        Self { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
    }

    /// Returns whether the network contains an address.
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4()
            && host_bits(address, self.prefix).0 == host_bits(self.address, self.prefix).0
    }

    /// Returns whether the network contains all addresses of another.
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }

    /// Returns whether the networks have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }
}

/// Returns the network bits and the host bits of an address.
fn host_bits(address: IpAddr, prefix: u8) -> (u128, u128) {
    let (bits, width) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32_u32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    let host = width.saturating_sub(u32::from(prefix));
    let mask = u128::MAX.checked_shr(128 - host).unwrap_or(0);
    (bits & !mask, bits & mask)
}

impl FromStr for Cidr {
    type Err = NotACidr;

    fn from_str(text: &str) -> Result<Self, NotACidr> {
        let (address, prefix) = text.split_once('/').ok_or(NotACidr)?;
        let address: IpAddr = address.parse().map_err(|_| NotACidr)?;
        // `u8::from_str` accepts "+8" and "08".
        let canonical = |prefix: &u8| {
            prefix.to_string() == text[text.len() - prefix.to_string().len()..]
                && text.ends_with(&format!("/{prefix}"))
        };
        let prefix = prefix.parse().ok().filter(canonical).ok_or(NotACidr)?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        if prefix > width || host_bits(address, prefix).1 != 0 {
            Err(NotACidr)
        } else {
            Ok(Self { address, prefix })
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_networks_without_host_bits_parse() {
        for good in ["10.200.0.0/16", "0.0.0.0/0", "1.2.3.4/32", "fd00::/8", "::/0", "::1/128"] {
            assert_eq!(good.parse::<Cidr>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "/",
            "10.0.0.0",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "10.0.0.0/08",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "fd00::1/8",
            "::/129",
            "a/8",
            "10.0.0.0/8 ",
        ] {
            assert_eq!(bad.parse::<Cidr>(), Err(NotACidr), "{bad}");
        }
    }

    #[test]
    fn network_contains_only_its_addresses() {
        let network: Cidr = "10.200.0.0/16".parse().unwrap();
        assert!(network.contains("10.200.255.1".parse().unwrap()));
        assert!(!network.contains("10.201.0.0".parse().unwrap()));
        assert!(!network.contains("::a:c8:0:0".parse().unwrap()));
        let network: Cidr = "fd00::/8".parse().unwrap();
        assert!(network.contains("fdff::1".parse().unwrap()));
        assert!(!network.contains("fe00::".parse().unwrap()));
    }

    #[test]
    fn networks_overlap_if_either_covers_the_other() {
        let network = |text: &str| text.parse::<Cidr>().unwrap();
        let (wide, narrow) = (network("10.8.0.0/16"), network("10.8.3.0/24"));
        assert!(wide.covers(&narrow) && !narrow.covers(&wide) && wide.covers(&wide));
        assert!(wide.overlaps(&narrow) && narrow.overlaps(&wide));
        assert!(!wide.overlaps(&network("10.9.0.0/16")));
        assert!(!network("0.0.0.0/0").overlaps(&network("::/0")));
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_without_panic(text in "\\PC*") {
            if let Ok(network) = text.parse::<Cidr>() {
                prop_assert_eq!(network.to_string().parse::<Cidr>(), Ok(network));
            }
        }

        #[test]
        fn network_round_trips_through_text(bits: u32, prefix in 0_u8..=32) {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            let address = Ipv4Addr::from(bits & mask);
            let network = Cidr { address: address.into(), prefix };
            prop_assert_eq!(network.to_string().parse::<Cidr>(), Ok(network));
            prop_assert!(network.contains(address.into()));
        }
    }
}
