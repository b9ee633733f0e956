//! hostPorts of a pod.

use std::net::IpAddr;

use kiyot_proto::cri;

use super::Refusal;
use crate::backends::milpa::providers::{HostPort, MAX_HOST_PORTS, Protocol};

/// Returns the ports of the node that lead to a pod. A mapping without a port of the node is
/// informational.
pub(crate) fn host_ports(config: &cri::PodSandboxConfig) -> Result<Vec<HostPort>, Refusal> {
    let requested = config.port_mappings.iter().filter(|mapping| mapping.host_port > 0);
    let bad = |mapping: &cri::PortMapping, what: &str| {
        Refusal(format!("hostPort {}: {what}", mapping.host_port))
    };
    let port = |mapping: &cri::PortMapping, number: i32| {
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        port.ok_or_else(|| bad(mapping, &format!("port {number}; allowed is 1 to {}", u16::MAX)))
    };
    let host_port = |mapping: &cri::PortMapping| {
        let protocol = match cri::Protocol::try_from(mapping.protocol) {
            Ok(cri::Protocol::Tcp) => Protocol::Tcp,
            Ok(cri::Protocol::Udp) => Protocol::Udp,
            Ok(cri::Protocol::Sctp) => Protocol::Sctp,
            Err(_) => {
                return Err(bad(
                    mapping,
                    &format!("protocol {}; allowed are TCP, UDP and SCTP", mapping.protocol),
                ));
            }
        };
        let ip = match mapping.host_ip.as_str() {
            "" => None,
            text => Some(
                text.parse::<IpAddr>()
                    .map_err(|_| bad(mapping, &format!("hostIP {text:?} is not an address")))?,
            ),
        };
        Ok(HostPort {
            protocol,
            host_ip: ip.filter(|ip| !ip.is_unspecified()),
            host_port: port(mapping, mapping.host_port)?,
            container_port: port(mapping, mapping.container_port)?,
        })
    };
    let number = requested.clone().count();
    if number > MAX_HOST_PORTS {
        return Err(Refusal(format!(
            "{number} hostPorts; allowed are at most {MAX_HOST_PORTS} for a pod"
        )));
    }
    requested.map(host_port).collect()
}
