//! hostPorts of a pod.

use kiyot_engine::provider::{HostPort, MAX_HOST_PORTS};
use kiyot_proto::cri;

use super::Refusal;

/// Returns the ports of the node that lead to a pod. A mapping without a hostPort is informational.
pub(crate) fn host_ports(config: &cri::PodSandboxConfig) -> Result<Vec<HostPort>, Refusal> {
    let requested = config.port_mappings.iter().filter(|mapping| mapping.host_port > 0);
    let host_port = |mapping: &cri::PortMapping| {
        HostPort::of_mapping(mapping)
            .map_err(|what| Refusal(format!("hostPort {}: {what}", mapping.host_port)))
    };
    let number = requested.clone().count();
    if number > MAX_HOST_PORTS {
        return Err(Refusal(format!(
            "{number} hostPorts; allowed are at most {MAX_HOST_PORTS} for a pod"
        )));
    }
    requested.map(host_port).collect()
}
