//! The policy on pods in cells: host access, capabilities, devices and name servers. Pure.

use kiyot_link::resolver::MAX_SERVERS;
use kiyot_proto::cri;

mod capabilities;
mod gpus;
mod host_access;
mod host_ports;
mod kernel_access;
pub(crate) mod seccomp;

#[cfg(test)]
mod tests;

pub use gpus::check_gpus;
pub use host_access::Rules;
use host_access::{AccessOutcome, HostAccess};
pub(crate) use host_ports::host_ports;
use kernel_access::KernelAccess;
use kiyot_config::{NodeResolver, Policy, Privileged};

use crate::backends::milpa::resolver::Server;

/// Prefix of container annotations in which a device plugin may name CDI devices.
const CDI_ANNOTATION_PREFIX: &str = "cdi.k8s.io/";

/// Refusal of a request by the policy, with the text of the pod's event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// Refuses a sandbox that requests what its cell does not have.
pub fn check_sandbox(rules: &Rules, config: &cri::PodSandboxConfig) -> Result<(), Refusal> {
    let metadata = config.metadata.clone().unwrap_or_default();
    let pod = format!("pod {}/{}", metadata.namespace, metadata.name);
    check(rules, &pod, requested_by_sandbox(config))?;
    host_ports(config).map_err(|refusal| Refusal(format!("{pod} asks for {refusal}")))?;
    let servers = servers_of_node(config);
    match (rules.policy.node_resolver, servers.first()) {
        (NodeResolver::Refuse, Some(server)) => {
            Err(refusal(&pod, &format!("the name server {server}, {NODE_RESOLVER}")))
        }
        (NodeResolver::Forward, Some(_)) if servers.len() > MAX_SERVERS => Err(refusal(
            &pod,
            &format!(
                "{} name servers that are the node's own (allowed: at most {MAX_SERVERS})",
                servers.len()
            ),
        )),
        _ => Ok(()),
    }
}

/// Returns the name servers that the daemon queries for a sandbox, without duplicates.
pub(crate) fn forwarded_resolvers(policy: &Policy, config: &cri::PodSandboxConfig) -> Vec<String> {
    if policy.node_resolver == NodeResolver::Forward { servers_of_node(config) } else { Vec::new() }
}

fn servers_of_node(config: &cri::PodSandboxConfig) -> Vec<String> {
    let mut servers = Vec::new();
    for server in config
        .dns_config
        .iter()
        .flat_map(|dns| &dns.servers)
        .filter(|server| Server::parse_node_only(server).is_some())
    {
        if !servers.contains(server) {
            servers.push(server.clone());
        }
    }
    servers
}

/// Returns the reason why a pod for a cell runs on the node instead: it requests host access, and
/// the policy keeps these pods local. The text ends the sentence "it ...". The pod runs on the node
/// even if it also requests access that is refused in a cell.
pub fn keeps_local(rules: &Rules, config: &cri::PodSandboxConfig) -> Option<String> {
    let kept = requested_by_sandbox(config)
        .find(|access| rules.outcome(*access) == AccessOutcome::KeptLocal)?;
    Some(match kept {
        // A sandbox is privileged if any of its containers is.
        HostAccess::Privileges => {
            "has a privileged container, and policy.privileged is \"keep-local\"".to_owned()
        }
        access => {
            format!("asks for {}, and policy.{} is \"keep-local\"", access.what(), access.key())
        }
    })
}

/// Returns a text for each requested host access that the policy grants, in general within the
/// pod's cell.
pub fn granted(rules: &Rules, config: &cri::PodSandboxConfig) -> Vec<String> {
    let granted = requested_by_sandbox(config)
        .filter(|access| rules.outcome(*access) == AccessOutcome::Granted);
    granted
        .map(|access| match (access, rules.policy.privileged) {
            (HostAccess::Privileges, Privileged::Allow)
                if !rules.capabilities.confines_privileges() =>
            {
                format!(
                    "is privileged, and policy.privileged is \"allow\": in a cell of the provider \
                     {:?} it is root on the node",
                    rules.capabilities.provider
                )
            }
            _ => format!("asks for {}, and gets {}", access.what(), access.granted()),
        })
        .collect()
}

/// Refuses a container that requests what its cell does not have.
pub fn check_container(rules: &Rules, config: &cri::ContainerConfig) -> Result<(), Refusal> {
    let name = config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
    let name = format!("container {name:?}");
    if let Some(device) = config.devices.first() {
        // The author of a block volume knows its path in the container, and the kubelet sends no
        // other name.
        let what = format!(
            "the device {:?} of the node at {:?} (a device or a block volume, which no policy \
             gives)",
            device.host_path, device.container_path
        );
        return Err(refusal(&name, &what));
    }
    if let Some(device) = config.cdi_devices.first() {
        return Err(refusal(&name, &format!("the device {:?} of the node", device.name)));
    }
    if let Some(key) = config.annotations.keys().find(|key| key.starts_with(CDI_ANNOTATION_PREFIX))
    {
        return Err(refusal(&name, &format!("devices of the node, by its annotation {key:?}")));
    }
    let Some(context) = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref())
    else {
        return Ok(());
    };
    let options = context.namespace_options.as_ref();
    check(rules, &name, HostAccess::of(options, context.privileged))?;
    if !rules.capabilities.confines_privileges()
        && let Some(access) = kernel_access::requested(config)
    {
        return check_kernel_access(rules, &name, &access);
    }
    let sees_the_cell =
        HostAccess::of(options, false).any(|access| access == HostAccess::Processes);
    match kernel_access::into_processes(context) {
        Some(capability)
            if sees_the_cell
                && !rules.capabilities.confines_privileges()
                && rules.policy.privileged != Privileged::Allow =>
        {
            Err(Refusal(format!(
                "{name} asks for the node's processes (hostPID) with the capability {capability}; \
                 policy.host_pid is \"cell\", but cells of the provider {:?} have the node's \
                 files, which the cell's own processes have open: allowed is one of the two",
                rules.capabilities.provider
            )))
        }
        _ => Ok(()),
    }
}

/// Returns the granted access of a container to the node's kernel, as the end of the sentence "it
/// ...".
pub fn granted_kernel_access(rules: &Rules, config: &cri::ContainerConfig) -> Option<String> {
    if rules.capabilities.confines_privileges()
        || rules.outcome(HostAccess::Privileges) != AccessOutcome::Granted
    {
        return None;
    }
    let access = kernel_access::requested(config)?;
    Some(format!(
        "has a container with {access}, and policy.privileged is \"allow\": in a cell of the \
         provider {:?} it reaches the node's kernel",
        rules.capabilities.provider
    ))
}

/// Closes the paths to the node's kernel in the request to a cell that shares the kernel. Only a
/// kubelet is sure to list these paths. Changes nothing if policy.privileged is "allow": a
/// privileged container then has all paths, and another container the paths that it requests.
pub(crate) fn close_kernel_paths(rules: &Rules, config: &mut cri::ContainerConfig) {
    if rules.capabilities.confines_privileges()
        || rules.outcome(HostAccess::Privileges) == AccessOutcome::Granted
    {
        return;
    }
    let linux = config.linux.get_or_insert_default();
    kernel_access::close_paths(linux.security_context.get_or_insert_default());
}

/// Decides on access to the kernel by the key of privileged containers, `policy.privileged`.
fn check_kernel_access(rules: &Rules, name: &str, access: &KernelAccess) -> Result<(), Refusal> {
    let reaching = format!("{access}, which reaches the node's kernel");
    match rules.outcome(HostAccess::Privileges) {
        AccessOutcome::Granted => Ok(()),
        AccessOutcome::Refused => {
            Err(refusal(name, &format!("{reaching} (policy.privileged is \"refuse\")")))
        }
        AccessOutcome::KeptLocal => Err(refusal(
            name,
            &format!(
                "{reaching} (policy.privileged is \"keep-local\", which moves a pod to the \
                 node only while no container of it runs)"
            ),
        )),
        AccessOutcome::Unsupported(_) => Err(Refusal(format!(
            "{name} asks for {access}; policy.privileged is \"cell\", but cells of the provider \
             {:?} share the node's kernel, which it reaches",
            rules.capabilities.provider
        ))),
    }
}

/// Returns whether pods run on the node if their containers request access to the kernel.
pub(crate) fn keeps_kernel_access_local(rules: &Rules) -> bool {
    !rules.capabilities.confines_privileges()
        && rules.outcome(HostAccess::Privileges) == AccessOutcome::KeptLocal
}

/// Returns the reason why the pod of a container runs on the node instead: the container requests
/// access to the kernel, and the policy keeps these pods local. The text ends the sentence "it
/// ...".
///
/// Unlike the access of [`keeps_local`], access to the kernel is not in the request for the
/// sandbox.
pub fn moves_to_node(rules: &Rules, config: &cri::ContainerConfig) -> Option<String> {
    if !keeps_kernel_access_local(rules) {
        return None;
    }
    let access = kernel_access::requested(config)?;
    Some(format!(
        "has a container with {access}, which reaches the node's kernel, and policy.privileged is \
         \"keep-local\""
    ))
}

/// The reason and the remedy in the refusal of a name server.
const NODE_RESOLVER: &str = "an address that is the node's own (set dnsPolicy or dnsConfig of the \
                             pod, or the kubelet's resolvConf or clusterDNS; the backend's \
                             policy.node_resolver is \"refuse\", and knows \"forward\")";

fn requested_by_sandbox(config: &cri::PodSandboxConfig) -> impl Iterator<Item = HostAccess> + '_ {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    HostAccess::of(
        context.and_then(|context| context.namespace_options.as_ref()),
        context.is_some_and(|context| context.privileged),
    )
}

fn check(
    rules: &Rules,
    requester: &str,
    mut requested: impl Iterator<Item = HostAccess>,
) -> Result<(), Refusal> {
    // Access that is kept local is refused here: its pod is in a cell already, because the request
    // for the sandbox did not have the access.
    let refused = requested.find_map(|access| match rules.outcome(access) {
        AccessOutcome::Granted => None,
        AccessOutcome::Refused => Some(refusal(
            requester,
            &format!("{} (policy.{} is \"refuse\")", access.what(), access.key()),
        )),
        AccessOutcome::KeptLocal => Some(refusal(requester, access.what())),
        AccessOutcome::Unsupported(why) => Some(Refusal(format!(
            "{requester} asks for {}; policy.{} is \"cell\", but cells of the provider {:?} {why}",
            access.what(),
            access.key(),
            rules.capabilities.provider
        ))),
    });
    refused.map_or(Ok(()), Err)
}

fn refusal(requester: &str, what: &str) -> Refusal {
    Refusal(format!(
        "{requester} asks for {what}, which a pod in a cell can't have; run it on the node, or ask \
         for less"
    ))
}
