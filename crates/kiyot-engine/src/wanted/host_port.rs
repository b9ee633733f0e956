//! Host ports of a pod (`hostPort`).

use std::{fmt, net::IpAddr};

use kiyot_proto::cri;
use serde::{Deserialize, Serialize};

/// Bounds the host ports of a pod: they are one firewall transaction, and are compared with the
/// ports of every other cell.
pub const MAX_HOST_PORTS: usize = 1000;

/// A host port of a pod (`hostPort`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// The protocol of both ports.
    pub protocol: Protocol,
    /// The address on the node; `None` for all addresses.
    pub host_ip: Option<IpAddr>,
    /// The port on the node, not 0.
    pub host_port: u16,
    /// The port in the pod, not 0.
    pub container_port: u16,
}

/// The protocol of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// Returns the name that CNI plugins and `iptables` use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl HostPort {
    /// Returns the host port of a CRI mapping. The error names the wrong value.
    pub fn of_mapping(mapping: &cri::PortMapping) -> Result<Self, String> {
        let port = |number: i32| {
            let port = u16::try_from(number).ok().filter(|port| *port > 0);
            port.ok_or_else(|| format!("port {number}; allowed is 1 to {}", u16::MAX))
        };
        let protocol = match cri::Protocol::try_from(mapping.protocol) {
            Ok(cri::Protocol::Tcp) => Protocol::Tcp,
            Ok(cri::Protocol::Udp) => Protocol::Udp,
            Ok(cri::Protocol::Sctp) => Protocol::Sctp,
            Err(_) => {
                let number = mapping.protocol;
                return Err(format!("protocol {number}; allowed are TCP, UDP and SCTP"));
            }
        };
        let ip = match mapping.host_ip.as_str() {
            "" => None,
            text => {
                let ip = text.parse::<IpAddr>();
                Some(ip.map_err(|_| format!("hostIP {text:?} is not an address"))?)
            }
        };
        Ok(Self {
            protocol,
            host_ip: ip.filter(|ip| !ip.is_unspecified()),
            host_port: port(mapping.host_port)?,
            container_port: port(mapping.container_port)?,
        })
    }

    /// Returns whether a packet can match both ports.
    pub fn overlaps(&self, other: &Self) -> bool {
        let same_address =
            self.host_ip.is_none() || other.host_ip.is_none() || self.host_ip == other.host_ip;
        self.protocol == other.protocol && self.host_port == other.host_port && same_address
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hostPort {}/{}", self.host_port, self.protocol.name())?;
        self.host_ip.map_or(Ok(()), |ip| write!(f, " of {ip}"))
    }
}
