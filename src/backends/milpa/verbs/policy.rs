//! What a pod may not ask of a cell. Pure.

use kiyot_link::resolver::MOST;
use kiyot_proto::cri;
use tonic::Status;

use crate::{
    backends::milpa::resolver::Server,
    config::{HostNamespaces, NodeResolver, Policy, Privileged},
};

/// Refuses a sandbox that asks for a namespace of the node, or for privileges that cells do not give.
pub fn check_sandbox(policy: &Policy, config: &cri::PodSandboxConfig) -> Result<(), Status> {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let metadata = config.metadata.clone().unwrap_or_default();
    let refused = context.and_then(|context| {
        let namespace = context.namespace_options.as_ref().and_then(node_namespace);
        namespace.or((context.privileged && policy.privileged != Privileged::Allow).then_some(PRIVILEGED))
    });
    let pod = format!("pod {}/{}", metadata.namespace, metadata.name);
    if let Some(what) = refused {
        return Err(refusal(&pod, what));
    }
    let servers = servers_of_node(config);
    match (policy.node_resolver, servers.first()) {
        (NodeResolver::Refuse, Some(server)) => Err(refusal(&pod, &format!("the name server {server}, {NODE_RESOLVER}"))),
        (NodeResolver::Forward, Some(_)) if servers.len() > MOST => {
            Err(refusal(&pod, &format!("{} name servers that are the node's own; at most {MOST} are asked for it", servers.len())))
        }
        _ => Ok(()),
    }
}

/// The name servers of a sandbox that the daemon is to ask for it, each once, as the configuration has them.
pub(super) fn asked_for_it(policy: &Policy, config: &cri::PodSandboxConfig) -> Vec<String> {
    if policy.node_resolver == NodeResolver::Forward { servers_of_node(config) } else { Vec::new() }
}

fn servers_of_node(config: &cri::PodSandboxConfig) -> Vec<String> {
    let mut servers = Vec::new();
    for server in config.dns_config.iter().flat_map(|dns| &dns.servers).filter(|server| Server::of_node(server).is_some()) {
        if !servers.contains(server) {
            servers.push(server.clone());
        }
    }
    servers
}

/// Why a pod for a cell runs on the node instead: it asks for what cells do not give, and the policy is to keep such pods local. The text ends the sentence "it ...".
/// A pod that asks for something else as well that is to be refused runs there too: the node gives it all.
pub fn keeps_local(policy: &Policy, config: &cri::PodSandboxConfig) -> Option<String> {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref())?;
    let namespace = context.namespace_options.as_ref().and_then(node_namespace).filter(|_| policy.host_namespaces == HostNamespaces::KeepLocal);
    // The kubelet says of a sandbox whether any of its containers is privileged.
    let privileged = context.privileged && policy.privileged == Privileged::KeepLocal;
    match namespace {
        Some(what) => Some(format!("asks for {what}, and policy.host_namespaces is \"keep-local\"")),
        None => privileged.then(|| "has a privileged container, and policy.privileged is \"keep-local\"".to_owned()),
    }
}

/// Refuses a container that asks for what its cell does not have.
pub fn check_container(policy: &Policy, config: &cri::ContainerConfig) -> Result<(), Status> {
    let name = config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
    let name = format!("container {name:?}");
    if let Some(device) = config.devices.first() {
        return Err(refusal(&name, &format!("the device {:?} of the node", device.host_path)));
    }
    if let Some(device) = config.cdi_devices.first() {
        return Err(refusal(&name, &format!("the device {:?} of the node", device.name)));
    }
    let Some(context) = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref()) else { return Ok(()) };
    if let Some(what) = context.namespace_options.as_ref().and_then(node_namespace) {
        return Err(refusal(&name, what));
    }
    if context.privileged && policy.privileged != Privileged::Allow {
        return Err(refusal(&name, PRIVILEGED));
    }
    Ok(())
}

const PRIVILEGED: &str = "to be privileged (securityContext.privileged; the backend's policy.privileged is not \"allow\")";

const NODE_RESOLVER: &str = "an address that is the node's own (set dnsPolicy or dnsConfig of the pod, or the kubelet's resolvConf or clusterDNS; the \
                            backend's policy.node_resolver is \"refuse\", and knows \"forward\")";

fn node_namespace(options: &cri::NamespaceOption) -> Option<&'static str> {
    use cri::NamespaceMode::{Node, Pod};
    if options.network() == Node {
        Some("the node's network (hostNetwork)")
    } else if options.pid() == Node {
        Some("the node's processes (hostPID)")
    } else if options.ipc() == Node {
        Some("the node's IPC (hostIPC)")
    } else if options.userns_options.as_ref().is_some_and(|userns| userns.mode() == Pod) {
        Some("a user namespace of its own (hostUsers: false)")
    } else {
        None
    }
}

fn refusal(who: &str, what: &str) -> Status {
    Status::invalid_argument(format!("{who} asks for {what}, which a pod in a cell can't have; run it on the node, or ask for less"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(options: cri::NamespaceOption, privileged: bool) -> cri::PodSandboxConfig {
        let context = cri::LinuxSandboxSecurityContext { namespace_options: Some(options), privileged, ..Default::default() };
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata { name: "web".to_owned(), namespace: "shop".to_owned(), ..Default::default() }),
            linux: Some(cri::LinuxPodSandboxConfig { security_context: Some(context), ..Default::default() }),
            ..Default::default()
        }
    }

    #[test]
    fn what_the_node_alone_has_is_refused_by_name() {
        let node = cri::NamespaceMode::Node.into();
        let mapping = cri::IdMapping { host_id: 100_000, container_id: 0, length: 65536 };
        let userns = cri::UserNamespace { mode: cri::NamespaceMode::Pod.into(), uids: vec![mapping], gids: vec![mapping] };
        for (options, word) in [
            (cri::NamespaceOption { network: node, ..Default::default() }, "hostNetwork"),
            (cri::NamespaceOption { pid: node, ..Default::default() }, "hostPID"),
            (cri::NamespaceOption { ipc: node, ..Default::default() }, "hostIPC"),
            (cri::NamespaceOption { userns_options: Some(userns), ..Default::default() }, "hostUsers"),
        ] {
            let status = check_sandbox(&Policy::default(), &sandbox(options, false)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().contains(word) && status.message().contains("shop/web"), "{status}");
        }
    }

    #[test]
    fn a_pod_that_asks_for_the_nodes_namespaces_stays_there_if_the_policy_says_so() {
        let config = sandbox(cri::NamespaceOption { pid: cri::NamespaceMode::Node.into(), ..Default::default() }, false);
        let keep = Policy { host_namespaces: HostNamespaces::KeepLocal, ..Policy::default() };
        let why = "asks for the node's processes (hostPID), and policy.host_namespaces is \"keep-local\"";
        assert_eq!(keeps_local(&keep, &config).as_deref(), Some(why));
        assert_eq!(keeps_local(&Policy::default(), &config), None);
        assert_eq!(keeps_local(&keep, &cri::PodSandboxConfig::default()), None);
    }

    #[test]
    fn a_pod_with_a_user_namespace_of_its_own_stays_on_the_node_too() {
        let userns = cri::UserNamespace { mode: cri::NamespaceMode::Pod.into(), ..Default::default() };
        let config = sandbox(cri::NamespaceOption { userns_options: Some(userns), ..Default::default() }, false);
        let keep = Policy { host_namespaces: HostNamespaces::KeepLocal, ..Policy::default() };
        assert!(keeps_local(&keep, &config).unwrap().contains("hostUsers: false"));
    }

    #[test]
    fn a_privileged_pod_stays_on_the_node_if_the_policy_says_so() {
        let keep = Policy { privileged: Privileged::KeepLocal, ..Policy::default() };
        let config = sandbox(cri::NamespaceOption::default(), true);
        assert_eq!(keeps_local(&keep, &config).as_deref(), Some("has a privileged container, and policy.privileged is \"keep-local\""));
        assert_eq!(keeps_local(&Policy::default(), &config), None);
        // What comes to a cell all the same, past the sandbox, is refused there.
        assert!(check_sandbox(&keep, &config).is_err());
    }

    #[test]
    fn privileges_are_a_matter_of_policy() {
        let config = sandbox(cri::NamespaceOption::default(), true);
        assert!(check_sandbox(&Policy::default(), &config).is_err());
        assert!(check_sandbox(&Policy { privileged: Privileged::Allow, ..Policy::default() }, &config).is_ok());
    }

    #[test]
    fn name_servers_of_the_node_are_refused_by_address() {
        let config = |server: &str| {
            let servers = vec!["10.96.0.10".to_owned(), server.to_owned()];
            cri::PodSandboxConfig { dns_config: Some(cri::DnsConfig { servers, ..Default::default() }), ..Default::default() }
        };
        for server in ["127.0.0.53", "127.0.0.1", "169.254.20.10", "0.0.0.0", "::1", "fe80::1%eth0", "::ffff:127.0.0.1"] {
            let status = check_sandbox(&Policy::default(), &config(server)).unwrap_err();
            assert!(status.message().contains(server) && status.message().contains("node_resolver"), "{status}");
            let allow = Policy { node_resolver: NodeResolver::Allow, ..Policy::default() };
            assert!(check_sandbox(&allow, &config(server)).is_ok());
        }
        for server in ["1.1.1.1", "2001:db8::1", "not an address"] {
            assert!(check_sandbox(&Policy::default(), &config(server)).is_ok());
        }
    }

    #[test]
    fn name_servers_of_the_node_are_asked_for_the_pod() {
        let config = |servers: &[&str]| {
            let servers = servers.iter().map(|server| (*server).to_owned()).collect();
            cri::PodSandboxConfig { dns_config: Some(cri::DnsConfig { servers, ..Default::default() }), ..Default::default() }
        };
        let forward = Policy { node_resolver: NodeResolver::Forward, ..Policy::default() };
        let some = config(&["10.96.0.10", "127.0.0.53", "fe80::1%eth0", "127.0.0.53"]);
        assert!(check_sandbox(&forward, &some).is_ok());
        assert_eq!(asked_for_it(&forward, &some), ["127.0.0.53", "fe80::1%eth0"]);
        assert_eq!(asked_for_it(&Policy { node_resolver: NodeResolver::Allow, ..forward }, &some), Vec::<String>::new());
        let many: Vec<_> = (0..=MOST).map(|number| format!("127.0.0.{number}")).collect();
        let status = check_sandbox(&forward, &config(&many.iter().map(String::as_str).collect::<Vec<_>>())).unwrap_err();
        assert!(status.message().contains("9 name servers") && status.message().contains("at most 8"), "{status}");
    }

    #[test]
    fn an_ordinary_pod_is_fine() {
        let options = cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
        assert!(check_sandbox(&Policy::default(), &sandbox(options, false)).is_ok());
        assert!(check_sandbox(&Policy::default(), &cri::PodSandboxConfig::default()).is_ok());
        assert!(check_container(&Policy::default(), &cri::ContainerConfig::default()).is_ok());
    }

    #[test]
    fn a_device_of_the_node_is_refused() {
        let device = cri::Device { host_path: "/dev/kvm".to_owned(), ..Default::default() };
        let status = check_container(&Policy::default(), &cri::ContainerConfig { devices: vec![device], ..Default::default() }).unwrap_err();
        assert!(status.message().contains("/dev/kvm"));
    }
}
