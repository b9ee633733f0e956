//! What a pod may not ask of a cell. Pure.

use kiyot_link::resolver::MAX_SERVERS;
use kiyot_proto::cri;
use tonic::Status;

mod capabilities;
mod host_access;
mod host_ports;
mod kernel_access;
pub(crate) mod seccomp;

#[cfg(test)]
mod tests;

pub use host_access::Rules;
use host_access::{Asked, Outcome};
pub(crate) use host_ports::host_ports;
use kernel_access::KernelAccess;

use crate::{
    backends::milpa::resolver::Server,
    config::{NodeResolver, Policy, Privileged},
};

/// The prefix of a container's annotations by which a device plugin may name CDI devices to
/// containerd.
const CDI_ANNOTATIONS: &str = "cdi.k8s.io/";

/// Refuses a sandbox that asks for what its cell does not give.
pub fn check_sandbox(rules: &Rules, config: &cri::PodSandboxConfig) -> Result<(), Status> {
    let metadata = config.metadata.clone().unwrap_or_default();
    let pod = format!("pod {}/{}", metadata.namespace, metadata.name);
    check(rules, &pod, asked_by_sandbox(config))?;
    host_ports(config).map_err(|status| {
        Status::invalid_argument(format!("{pod} asks for {}", status.message()))
    })?;
    let servers = servers_of_node(config);
    match (rules.policy.node_resolver, servers.first()) {
        (NodeResolver::Refuse, Some(server)) => {
            Err(refusal(&pod, &format!("the name server {server}, {NODE_RESOLVER}")))
        }
        (NodeResolver::Forward, Some(_)) if servers.len() > MAX_SERVERS => Err(refusal(
            &pod,
            &format!(
                "{} name servers that are the node's own; at most {MAX_SERVERS} are asked for it",
                servers.len()
            ),
        )),
        _ => Ok(()),
    }
}

/// The name servers of a sandbox that the daemon is to ask for it, each once, as the configuration
/// has them.
pub(crate) fn asked_for_it(policy: &Policy, config: &cri::PodSandboxConfig) -> Vec<String> {
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

/// Why a pod for a cell runs on the node instead: it asks for what is the node's, and the policy is
/// to keep such pods local. The text ends the sentence "it ...". A pod that asks for something else
/// as well that is to be refused runs there too: the node gives it all.
pub fn keeps_local(rules: &Rules, config: &cri::PodSandboxConfig) -> Option<String> {
    let kept =
        asked_by_sandbox(config).find(|asked| rules.outcome(*asked) == Outcome::KeptLocal)?;
    Some(match kept {
        // The kubelet says of a sandbox whether any of its containers is privileged.
        Asked::Privileges => {
            "has a privileged container, and policy.privileged is \"keep-local\"".to_owned()
        }
        asked => format!("asks for {}, and policy.{} is \"keep-local\"", asked.what(), asked.key()),
    })
}

/// What a pod that asks for the node's is given of its cell's instead, one text for each.
pub fn given(rules: &Rules, config: &cri::PodSandboxConfig) -> Vec<String> {
    let given = asked_by_sandbox(config).filter(|asked| rules.outcome(*asked) == Outcome::Given);
    given
        .map(|asked| match (asked, rules.policy.privileged) {
            (Asked::Privileges, Privileged::Allow) if !rules.isolation.privileges => {
                format!(
                    "is privileged, and policy.privileged is \"allow\": in a cell of the provider {:?} it is root on the node",
                    rules.isolation.provider
                )
            }
            _ => format!("asks for {}, and gets {}", asked.what(), asked.given()),
        })
        .collect()
}

/// Refuses a container that asks for what its cell does not have.
pub fn check_container(rules: &Rules, config: &cri::ContainerConfig) -> Result<(), Status> {
    let name = config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
    let name = format!("container {name:?}");
    if let Some(device) = config.devices.first() {
        // Of a block volume the pod's author knows the path in the container, and the kubelet sends
        // no other name.
        let what = format!(
            "the device {:?} of the node at {:?} (a device or a block volume, which no policy gives)",
            device.host_path, device.container_path
        );
        return Err(refusal(&name, &what));
    }
    if let Some(device) = config.cdi_devices.first() {
        return Err(refusal(&name, &format!("the device {:?} of the node", device.name)));
    }
    if let Some(key) = config.annotations.keys().find(|key| key.starts_with(CDI_ANNOTATIONS)) {
        return Err(refusal(&name, &format!("devices of the node, by its annotation {key:?}")));
    }
    let Some(context) = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref())
    else {
        return Ok(());
    };
    let options = context.namespace_options.as_ref();
    check(rules, &name, Asked::of(options, context.privileged))?;
    if !rules.isolation.privileges
        && let Some(access) = kernel_access::requested(context)
    {
        return check_kernel_access(rules, &name, &access);
    }
    let sees_the_cell = Asked::of(options, false).any(|asked| asked == Asked::Processes);
    match kernel_access::into_processes(context) {
        Some(capability)
            if sees_the_cell
                && !rules.isolation.privileges
                && rules.policy.privileged != Privileged::Allow =>
        {
            Err(Status::invalid_argument(format!(
                "{name} asks for the node's processes (hostPID) with the capability {capability}; policy.host_pid is \"cell\", but cells of the provider \
                 {:?} have the node's files, which the cell's own processes have open: allowed is one of the two",
                rules.isolation.provider
            )))
        }
        _ => Ok(()),
    }
}

/// Returns what a container is given of the kernel's that its cell does not contain. Ends the
/// sentence "it ...".
pub fn given_kernel_access(rules: &Rules, config: &cri::ContainerConfig) -> Option<String> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    if rules.isolation.privileges || rules.outcome(Asked::Privileges) != Outcome::Given {
        return None;
    }
    let access = kernel_access::requested(context)?;
    Some(format!(
        "has a container with {access}, and policy.privileged is \"allow\": in a cell of the provider {:?} it reaches the node's kernel",
        rules.isolation.provider
    ))
}

/// Decides on access to the kernel by the key that decides on privileged containers.
fn check_kernel_access(rules: &Rules, name: &str, access: &KernelAccess) -> Result<(), Status> {
    let reaching = format!("{access}, which reaches the node's kernel");
    match rules.outcome(Asked::Privileges) {
        Outcome::Given => Ok(()),
        Outcome::Refused => {
            Err(refusal(name, &format!("{reaching} (policy.privileged is \"refuse\")")))
        }
        Outcome::KeptLocal => Err(refusal(
            name,
            &format!(
                "{reaching} (policy.privileged is \"keep-local\", which moves a pod to the \
                 node only while no container of it runs)"
            ),
        )),
        Outcome::NotThere(_) => Err(Status::invalid_argument(format!(
            "{name} asks for {access}; policy.privileged is \"cell\", but cells of the provider {:?} \
             share the node's kernel, which it reaches",
            rules.isolation.provider
        ))),
    }
}

/// Returns whether pods run on the node whose containers ask for access to the kernel.
pub(crate) fn keeps_kernel_access_local(rules: &Rules) -> bool {
    !rules.isolation.privileges && rules.outcome(Asked::Privileges) == Outcome::KeptLocal
}

/// Returns why the pod of a container runs on the node instead: the container asks for access to
/// the kernel, and the policy is to keep such pods local. Ends the sentence "it ...".
///
/// Unlike what [`keeps_local`] looks at, this is in no request for a sandbox.
pub fn moves_to_node(rules: &Rules, config: &cri::ContainerConfig) -> Option<String> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    if !keeps_kernel_access_local(rules) {
        return None;
    }
    let access = kernel_access::requested(context)?;
    Some(format!(
        "has a container with {access}, which reaches the node's kernel, and policy.privileged is \"keep-local\""
    ))
}

const NODE_RESOLVER: &str = "an address that is the node's own (set dnsPolicy or dnsConfig of the pod, or the kubelet's resolvConf or clusterDNS; the \
                            backend's policy.node_resolver is \"refuse\", and knows \"forward\")";

fn asked_by_sandbox(config: &cri::PodSandboxConfig) -> impl Iterator<Item = Asked> + '_ {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    Asked::of(
        context.and_then(|context| context.namespace_options.as_ref()),
        context.is_some_and(|context| context.privileged),
    )
}

fn check(rules: &Rules, who: &str, mut asked: impl Iterator<Item = Asked>) -> Result<(), Status> {
    // A pod that is kept local and comes here all the same, past the sandbox, is refused.
    let refused = asked.find_map(|asked| match rules.outcome(asked) {
        Outcome::Given => None,
        Outcome::Refused => {
            Some(refusal(who, &format!("{} (policy.{} is \"refuse\")", asked.what(), asked.key())))
        }
        Outcome::KeptLocal => Some(refusal(who, asked.what())),
        Outcome::NotThere(why) => Some(Status::invalid_argument(format!(
            "{who} asks for {}; policy.{} is \"cell\", but cells of the provider {:?} {why}",
            asked.what(),
            asked.key(),
            rules.isolation.provider
        ))),
    });
    refused.map_or(Ok(()), Err)
}

fn refusal(who: &str, what: &str) -> Status {
    Status::invalid_argument(format!(
        "{who} asks for {what}, which a pod in a cell can't have; run it on the node, or ask for less"
    ))
}
