//! Ports and addresses of port-forward. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::Error;

/// A pair of ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    /// The local port; 0 for any free port.
    pub(crate) local: u16,
    /// The port in the pod.
    pub(crate) remote: u16,
}

impl Ports {
    /// Parses `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`.
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let parsed = || {
            let (local, remote) = text.split_once(':').unwrap_or((text, text));
            let local = if local.is_empty() { 0 } else { local.parse().ok()? };
            let remote = remote.parse().ok().filter(|remote| *remote > 0)?;
            Some(Self { local, remote })
        };
        parsed().ok_or_else(|| {
            Error::Usage(format!(
                "port {text:?}; allowed: REMOTE, LOCAL:REMOTE or :REMOTE, with ports up to 65535 \
                 and a REMOTE of at least 1"
            ))
        })
    }
}

/// A local address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    /// The address.
    pub(crate) ip: IpAddr,
    /// An address that may be absent.
    pub(crate) is_optional: bool,
}

impl Address {
    /// Parses an address, or localhost: the loopback of IPv4, and of IPv6 if the node has it.
    pub(crate) fn parse(text: &str) -> Result<Vec<Self>, Error> {
        if text == "localhost" {
            return Ok(vec![
                Self { ip: Ipv4Addr::LOCALHOST.into(), is_optional: false },
                Self { ip: Ipv6Addr::LOCALHOST.into(), is_optional: true },
            ]);
        }
        match text.parse() {
            Ok(ip) => Ok(vec![Self { ip, is_optional: false }]),
            Err(_) => Err(Error::Usage(format!(
                "address {text:?}; allowed: localhost, or an address of IPv4 or IPv6"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_have_the_forms_of_kubectl() {
        for (text, local, remote) in
            [("80", 80, 80), ("8080:80", 8080, 80), (":80", 0, 80), ("0:80", 0, 80)]
        {
            assert_eq!(Ports::parse(text).unwrap(), Ports { local, remote }, "{text}");
        }
        for text in ["", "0", ":", "80:", "80:0", "65536", "a:80", "80:http", "1:2:3", "-1:80"] {
            assert_eq!(Ports::parse(text).unwrap_err().exit_code(), 64, "{text}");
        }
    }

    #[test]
    fn localhost_is_both_loopbacks_and_other_names_are_refused() {
        let both = Address::parse("localhost").unwrap();
        assert_eq!(
            both.iter().map(|address| address.is_optional).collect::<Vec<_>>(),
            [false, true]
        );
        assert_eq!(Address::parse("::").unwrap()[0].ip.to_string(), "::");
        assert_eq!(Address::parse("example.com").unwrap_err().exit_code(), 64);
    }
}
