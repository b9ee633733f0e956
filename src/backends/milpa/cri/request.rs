//! Requests of the kubelet as a cell's containerd must be told them. Pure.
//!
//! A cell is one pod and has the pod's network already: for its containerd the pod uses the network
//! of its host. What goes with that (host name, ports, sysctls of the network) is taken out of the
//! requests and given to the cell by `Bind`.

use std::collections::HashMap;

use kiyot_link::resolver;
use kiyot_proto::{
    cell::BindRequest,
    cri::{self, security_profile::ProfileType},
};

use crate::backends::milpa::providers::CGROUP_BENEATH_SLICE;

/// Sysctls of the network that containerd sets for a pod with a network of its own, and not for one
/// that uses its host's.
const USUAL_SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];
/// Where, beneath the cell's `pod_dir`, logs are.
const LOGS: &str = "logs";

/// A request whose only id is that of the sandbox or the container that it is for.
pub(super) trait Addressed {
    /// The same request, to whom the cell knows by this id.
    fn to(self, id: &str) -> Self;
}

macro_rules! addressed {
    ($($request:ident $field:ident;)*) => {
        $(impl Addressed for cri::$request {
            fn to(mut self, id: &str) -> Self {
                id.clone_into(&mut self.$field);
                self
            }
        })*

        /// The id fields that [`Addressed::to`] maps.
        #[cfg(test)]
        const ADDRESSED: &[(&str, &str)] = &[$((stringify!($request), stringify!($field)),)*];
    };
}

addressed! {
    StartContainerRequest container_id;
    StopContainerRequest container_id;
    RemoveContainerRequest container_id;
    ContainerStatusRequest container_id;
    UpdateContainerResourcesRequest container_id;
    ExecSyncRequest container_id;
    ExecRequest container_id;
    AttachRequest container_id;
    PortForwardRequest pod_sandbox_id;
    StopPodSandboxRequest pod_sandbox_id;
    PodSandboxStatusRequest pod_sandbox_id;
}

/// What the cell is told so that it is this pod, whose `resolvers` the daemon asks.
pub(super) fn bind(config: &cri::PodSandboxConfig, resolvers: &[String]) -> BindRequest {
    let asked =
        config.linux.iter().flat_map(|linux| &linux.sysctls).filter(|(name, _)| of_network(name));
    let usual = USUAL_SYSCTLS.map(|(name, value)| (name.to_owned(), value.to_owned()));
    BindRequest {
        pod_uid: config.metadata.as_ref().map(|metadata| metadata.uid.clone()).unwrap_or_default(),
        hostname: config.hostname.clone(),
        sysctls: usual
            .into_iter()
            .chain(asked.map(|(name, value)| (name.clone(), value.clone())))
            .collect(),
        resolvers: u32::try_from(resolvers.len()).unwrap_or(u32::MAX),
    }
}

/// A sysctl's name may be written with slashes.
fn of_network(sysctl: &str) -> bool {
    sysctl.starts_with("net.") || sysctl.starts_with("net/")
}

/// A sandbox's config for the cell, where `resolvers` are at addresses of the cell's own.
pub(super) fn sandbox_config(
    config: &cri::PodSandboxConfig,
    pod_dir: &str,
    resolvers: &[String],
) -> cri::PodSandboxConfig {
    let mut config = config.clone();
    // runc refuses a host name where there is no UTS namespace of the pod's own.
    config.hostname.clear();
    config.port_mappings.clear();
    config.log_directory = format!("{}/{LOGS}", pod_dir.trim_end_matches('/'));
    config.windows = None;
    for server in config.dns_config.iter_mut().flat_map(|dns| &mut dns.servers) {
        let number = resolvers.iter().position(|resolver| resolver == server);
        if let Some(address) = number.and_then(resolver::address) {
            *server = address.to_string();
        }
    }
    let linux = config.linux.get_or_insert_default();
    linux.sysctls.retain(|name, _| !of_network(name));
    linux.cgroup_parent = cgroup_parent(&linux.cgroup_parent);
    let options =
        linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
    on_the_cells_network(options);
    config
}

/// Returns the `cgroup_parent` for the cell's containerd, whose runc creates cgroups itself: for a
/// slice, which a kubelet with the driver `systemd` names, a directory beneath it.
fn cgroup_parent(requested: &str) -> String {
    let plain = requested.trim_end_matches('/');
    if plain.ends_with(".slice") {
        format!("{plain}/{CGROUP_BENEATH_SLICE}")
    } else {
        requested.to_owned()
    }
}

fn on_the_cells_network(options: &mut cri::NamespaceOption) {
    options.network = cri::NamespaceMode::Node.into();
    options.userns_options = None;
}

/// A sandbox for the cell.
pub(super) fn run_sandbox(
    config: &cri::PodSandboxConfig,
    pod_dir: &str,
    resolvers: &[String],
) -> cri::RunPodSandboxRequest {
    cri::RunPodSandboxRequest {
        config: Some(sandbox_config(config, pod_dir, resolvers)),
        runtime_handler: String::new(),
    }
}

/// What in a container's request is other in its cell.
#[derive(Debug, Clone)]
pub(super) struct InCell<'a> {
    /// The sandbox's id there.
    pub(super) sandbox: &'a str,
    /// The cell's directory for the pod.
    pub(super) pod_dir: &'a str,
    /// The name servers that have addresses in the cell.
    pub(super) resolvers: &'a [String],
    /// The image's id there.
    pub(super) image: &'a str,
    /// Its seccomp profile there, if it has one of the node's.
    pub(super) profile: Option<String>,
    /// The mounts there.
    pub(super) mounts: Vec<cri::Mount>,
    /// The log beneath the cell's log directory; "" for none.
    pub(super) log_path: String,
    /// The id there of the container whose processes it shares; "" for none.
    pub(super) target: &'a str,
}

/// A container for the cell.
pub(super) fn create_container(
    request: &cri::CreateContainerRequest,
    cell: InCell<'_>,
) -> cri::CreateContainerRequest {
    let mut config = request.config.clone().unwrap_or_default();
    config.image.get_or_insert_default().image = cell.image.to_owned();
    config.mounts = cell.mounts;
    for mount in &mut config.mounts {
        mount.uid_mappings.clear();
        mount.gid_mappings.clear();
    }
    config.log_path = cell.log_path;
    config.devices.clear();
    config.cdi_devices.clear();
    config.windows = None;
    let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
    if let Some(profile) = cell.profile {
        context.seccomp = Some(cri::SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: profile,
        });
    }
    let options = context.namespace_options.get_or_insert_default();
    on_the_cells_network(options);
    cell.target.clone_into(&mut options.target_id);
    cri::CreateContainerRequest {
        pod_sandbox_id: cell.sandbox.to_owned(),
        config: Some(config),
        sandbox_config: request
            .sandbox_config
            .as_ref()
            .map(|config| sandbox_config(config, cell.pod_dir, cell.resolvers)),
    }
}

/// The id, as the kubelet knows it, of the container whose processes this one is to share; "" for
/// none.
pub(super) fn target(config: &cri::ContainerConfig) -> &str {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    context
        .and_then(|context| context.namespace_options.as_ref())
        .map(|options| options.target_id.as_str())
        .unwrap_or_default()
}

/// Where a container's log is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogPaths {
    /// Absolute, on the node.
    pub(super) node: String,
    /// Beneath the cell's log directory.
    pub(super) in_logs: String,
    /// Beneath the cell's `pod_dir`.
    pub(super) in_pod_dir: String,
}

/// Where a container's log is; `None` if it has none. The cell's file is named by our id: no
/// container's log continues another's.
pub(super) fn log_paths(
    sandbox: &cri::PodSandboxConfig,
    container: &cri::ContainerConfig,
    id: &str,
) -> Option<LogPaths> {
    if sandbox.log_directory.is_empty() || container.log_path.is_empty() {
        return None;
    }
    let in_logs = format!("{id}/0.log");
    Some(LogPaths {
        node: format!(
            "{}/{}",
            sandbox.log_directory.trim_end_matches('/'),
            container.log_path.trim_start_matches('/')
        ),
        in_pod_dir: format!("{LOGS}/{in_logs}"),
        in_logs,
    })
}

/// A container's config as it may be kept on disk: its environment may hold secrets, and no answer
/// has it.
pub(super) fn without_secrets(config: &cri::ContainerConfig) -> cri::ContainerConfig {
    let mut config = config.clone();
    config.envs.iter_mut().for_each(|env| env.value.clear());
    config
}

/// Whether two requests for a sandbox mean the same: labels and annotations may change while it is
/// being made.
pub(super) fn same_sandbox(
    one: &cri::RunPodSandboxRequest,
    other: &cri::RunPodSandboxRequest,
) -> bool {
    let essence = |request: &cri::RunPodSandboxRequest| {
        let config = request.config.clone().map(|config| cri::PodSandboxConfig {
            labels: HashMap::new(),
            annotations: HashMap::new(),
            ..config
        });
        (config, request.runtime_handler.clone())
    };
    essence(one) == essence(other)
}

#[cfg(test)]
mod tests;
