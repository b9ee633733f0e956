//! Rewriting of the kubelet's requests for a cell's containerd. Pure.
//!
//! A cell already has the pod's network, so for the cell's containerd the pod uses the network of
//! its host. Settings that need a network namespace (host name, ports, network sysctls) are removed
//! from the requests and applied by `Bind`.

use std::collections::HashMap;

use kiyot_engine::provider::{CGROUP_BENEATH_SLICE, PodNetwork};
use kiyot_link::resolver;
use kiyot_linux::tree::{PathError, absolute, beneath};
use kiyot_proto::{
    cell::BindRequest,
    cri::{self, security_profile::ProfileType},
};

use crate::backends::milpa::images::NodeSettings;

mod hardware;
mod node_figures;

pub(super) use hardware::HasResources;
pub(super) use node_figures::{replace_node_variables, replaced_files};

/// The `cgroup_parent` of a pod in a machine.
const CGROUP_IN_MACHINE: &str = "/pod";
/// Directory of logs beneath the cell's `pod_dir`.
const LOG_DIR: &str = "logs";

/// A request with the id of its sandbox or container as its only id.
pub(super) trait Addressed {
    /// Replaces the id by the id in the cell.
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

        /// The id fields that [`Addressed::to`] replaces.
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

/// Returns the bind of a cell to a pod: the daemon queries `resolvers`, and sysctls are those of
/// the node's settings that the pod doesn't override.
pub(super) fn bind(
    config: &cri::PodSandboxConfig,
    resolvers: &[String],
    network: Option<&PodNetwork>,
    node: &NodeSettings,
) -> BindRequest {
    let requested =
        config.linux.iter().flat_map(|linux| &linux.sysctls).filter(|(name, _)| of_network(name));
    let default = node.sysctls().map(|(name, value)| (name.to_owned(), value.to_owned()));
    BindRequest {
        pod_uid: config.metadata.as_ref().map(|metadata| metadata.uid.clone()).unwrap_or_default(),
        hostname: config.hostname.clone(),
        sysctls: default
            .chain(requested.map(|(name, value)| (name.clone(), value.clone())))
            .collect(),
        resolvers: u32::try_from(resolvers.len()).unwrap_or(u32::MAX),
        network: network.map(Into::into),
        registries: Vec::new(),
        proxies: HashMap::new(),
    }
}

/// Returns whether a sysctl belongs to the network. Its name may have slashes.
fn of_network(sysctl: &str) -> bool {
    sysctl.starts_with("net.") || sysctl.starts_with("net/")
}

/// Returns a sandbox's config for the cell. In the cell, `resolvers` have addresses of the cell's
/// own. `cgroup_parent` comes from [`cgroup_parent`].
pub(super) fn sandbox_config(
    config: &cri::PodSandboxConfig,
    pod_dir: &str,
    resolvers: &[String],
    cgroup_parent: &str,
) -> cri::PodSandboxConfig {
    let mut config = config.clone();
    // runc refuses a host name without a UTS namespace of the pod.
    config.hostname.clear();
    config.port_mappings.clear();
    config.log_directory = format!("{}/{LOG_DIR}", pod_dir.trim_end_matches('/'));
    config.windows = None;
    for server in config.dns_config.iter_mut().flat_map(|dns| &mut dns.servers) {
        let number = resolvers.iter().position(|resolver| resolver == server);
        if let Some(address) = number.and_then(resolver::address) {
            *server = address.to_string();
        }
    }
    let linux = config.linux.get_or_insert_default();
    linux.sysctls.retain(|name, _| !of_network(name));
    cgroup_parent.clone_into(&mut linux.cgroup_parent);
    let options =
        linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
    use_cell_network(options);
    config
}

/// Returns the `cgroup_parent` of a sandbox for its cell's containerd, whose runc creates cgroups
/// itself. On the node's kernel it is the kubelet's, or a directory beneath it if the kubelet names
/// a slice (cgroup driver `systemd`). A machine has its own cgroups, where the kubelet's path has
/// no meaning.
pub(super) fn cgroup_parent(sandbox: &cri::PodSandboxConfig, own_kernel: bool) -> String {
    if own_kernel {
        return CGROUP_IN_MACHINE.to_owned();
    }
    let requested = sandbox.linux.as_ref().map_or("", |linux| &*linux.cgroup_parent);
    let plain = requested.trim_end_matches('/');
    if plain.ends_with(".slice") {
        format!("{plain}/{CGROUP_BENEATH_SLICE}")
    } else {
        requested.to_owned()
    }
}

/// Returns the `cgroup_parent` of a recorded sandbox. Earlier versions did not record it, and used
/// the kubelet's in machines, too.
pub(super) fn recorded_cgroup_parent(recorded: &str, sandbox: &cri::PodSandboxConfig) -> String {
    if recorded.is_empty() { cgroup_parent(sandbox, false) } else { recorded.to_owned() }
}

fn use_cell_network(options: &mut cri::NamespaceOption) {
    options.network = cri::NamespaceMode::Node.into();
    options.userns_options = None;
}

/// Returns the request for a sandbox in the cell. `profile` is the path of the sandbox's copied
/// seccomp profile.
pub(super) fn run_sandbox(
    config: &cri::PodSandboxConfig,
    pod_dir: &str,
    resolvers: &[String],
    cgroup_parent: &str,
    profile: Option<String>,
) -> cri::RunPodSandboxRequest {
    let mut config = sandbox_config(config, pod_dir, resolvers, cgroup_parent);
    if profile.is_some() {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().seccomp = profile.map(localhost_profile);
    }
    cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() }
}

/// Returns a seccomp profile with a path in the cell.
fn localhost_profile(path: String) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: path }
}

/// The parts of a container's request that differ in the cell.
#[derive(Debug, Clone)]
pub(super) struct InCell<'a> {
    /// The sandbox's id.
    pub(super) sandbox: &'a str,
    /// The cell's directory for the pod.
    pub(super) pod_dir: &'a str,
    /// The name servers with addresses in the cell.
    pub(super) resolvers: &'a [String],
    /// The sandbox's [`recorded_cgroup_parent`]. Its usage is the pod's, and on the node's kernel
    /// the end of the cell looks there for the containers' cgroups.
    pub(super) cgroup_parent: &'a str,
    /// The image's id.
    pub(super) image: &'a str,
    /// The path of the copied seccomp profile, if any.
    pub(super) profile: Option<String>,
    pub(super) mounts: Vec<cri::Mount>,
    /// The log beneath the cell's log directory; "" without a log.
    pub(super) log_path: String,
    /// The id of the container whose processes this container shares; "" without sharing.
    pub(super) target: &'a str,
}

/// Returns the request for a container in the cell.
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
        context.seccomp = Some(localhost_profile(profile));
    }
    let options = context.namespace_options.get_or_insert_default();
    use_cell_network(options);
    cell.target.clone_into(&mut options.target_id);
    cri::CreateContainerRequest {
        pod_sandbox_id: cell.sandbox.to_owned(),
        config: Some(config),
        sandbox_config: request
            .sandbox_config
            .as_ref()
            .map(|config| sandbox_config(config, cell.pod_dir, cell.resolvers, cell.cgroup_parent)),
    }
}

/// Returns the kubelet's id of the container whose processes a container shares.
pub(super) fn target(config: &cri::ContainerConfig) -> Option<&str> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    Some(&*context.namespace_options.as_ref()?.target_id).filter(|id| !id.is_empty())
}

/// The paths of a container's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogPaths {
    /// Absolute path on the node.
    pub(super) node: String,
    /// Beneath the cell's log directory.
    pub(super) in_logs: String,
    /// Beneath the cell's `pod_dir`.
    pub(super) in_pod_dir: String,
}

/// Returns the paths of a container's log; `None` without a log. The cell's file is named by the
/// container's id on the node, so that no container continues another's log. A path that leads out
/// of the sandbox's log directory is an error.
pub(super) fn log_paths(
    sandbox: &cri::PodSandboxConfig,
    container: &cri::ContainerConfig,
    id: &str,
) -> Result<Option<LogPaths>, PathError> {
    let (directory, log) = (&*sandbox.log_directory, &*container.log_path);
    if directory.is_empty() || log.is_empty() {
        return Ok(None);
    }
    let in_logs = format!("{id}/0.log");
    Ok(Some(LogPaths {
        node: beneath(&absolute(directory)?, log.trim_start_matches('/'))?.display().to_string(),
        in_pod_dir: format!("{LOG_DIR}/{in_logs}"),
        in_logs,
    }))
}

/// Returns a container's config for its record, without the values of the environment, which may be
/// secrets and which no response needs.
pub(super) fn without_secrets(config: &cri::ContainerConfig) -> cri::ContainerConfig {
    let mut config = config.clone();
    config.envs.iter_mut().for_each(|env| env.value.clear());
    config
}

/// Returns whether two requests are for the same sandbox. Labels and annotations are ignored,
/// because they may change while the sandbox is created.
pub(super) fn same_sandbox(a: &cri::RunPodSandboxRequest, b: &cri::RunPodSandboxRequest) -> bool {
    let essence = |request: &cri::RunPodSandboxRequest| {
        let config = request.config.clone().map(|config| cri::PodSandboxConfig {
            labels: HashMap::new(),
            annotations: HashMap::new(),
            ..config
        });
        (config, request.runtime_handler.clone())
    };
    essence(a) == essence(b)
}

#[cfg(test)]
mod tests;
