//! Configuration as validated, immutable data.
//!
//! Values come from the defaults, then from the file, then from the environment
//! (`KIYOT_SERVER__LISTEN` is `server.listen`). Keys are read one by one, so that all problems of a
//! configuration are reported at once.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

pub use kiyot_values::problems::Problems;
use kiyot_values::problems::{Problem, Report, Table};

mod admin;
mod backends;
mod capacity;
mod checks;
mod diff;
mod ec2;
mod gateway;
mod kubernetes;
mod limits;
mod local_machine;
mod local_network;
mod metrics;
mod milpa;
mod netns;
mod placement;
mod qemu;
mod read;
mod routing;
mod server;
mod sockets;
mod source;
mod tags;
mod warm;

pub use admin::Admin;
pub use backends::{BackendConfig, CriBackend};
pub use capacity::{Capacity, Figures};
pub use diff::{Change, Diff};
pub use ec2::{
    Ec2, ImageFilter, PriceSource, RefusedRoute, TooManyGroups, VolumePerformance, VolumeType,
};
pub use gateway::{Advertise, GatewayListen};
pub use kubernetes::{Kubernetes, KubernetesAccess};
pub use limits::Limits;
pub use local_machine::LocalMachine;
pub use local_network::LocalNetwork;
pub use metrics::Metrics;
pub use milpa::{
    HostAccessPolicy, HostPath, ImageSource, MAX_CELLS_LIMIT, MilpaBackend, NodeResolver,
    PROVIDERS, Policy, Privileged, ProviderKind,
};
pub use netns::Netns;
pub use placement::Placement;
pub use qemu::{AcceleratorChoice, Qemu};
pub use routing::{Routing, Rule};
pub use server::Server;
pub use tags::{
    AWS_TAG_PREFIX, MAX_CONFIGURED_TAGS, MAX_TAG_KEY_BYTES, MAX_TAG_VALUE_BYTES, MAX_TAGS,
    NAME_TAG, OWN_TAG_PREFIX, TagFault, check_tag_key, check_tag_value,
};
pub use warm::{WarmKind, WarmLaunchType, WarmPool};

/// Configuration of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// CRI socket and its limits.
    pub server: Server,
    /// Page of metrics and health.
    pub metrics: Metrics,
    /// Socket of the admin API.
    pub admin: Admin,
    /// Access to the Kubernetes API.
    pub kubernetes: Kubernetes,
    /// Backends, by name.
    pub backends: BTreeMap<String, BackendConfig>,
    /// Rules that choose a pod's backend.
    pub routing: Routing,
}

/// Reads and validates a file, with the environment's variables over it.
pub fn load(path: &Path) -> Result<Config, Problems> {
    let text =
        source::read(path).map_err(|problem| Problems::one(path.display().to_string(), problem))?;
    let environment = std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
    read_all(&path.display().to_string(), &text, environment, &sockets::real)
}

/// Reads and validates a text, with the given variables over it. Problems call the text `name`.
pub fn parse(
    name: &str,
    text: &str,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, Problems> {
    read_all(name, text, environment, &Path::to_path_buf)
}

/// `real` resolves a socket's path, because two paths may lead to one socket.
fn read_all(
    name: &str,
    text: &str,
    environment: impl IntoIterator<Item = (String, String)>,
    real: &dyn Fn(&Path) -> PathBuf,
) -> Result<Config, Problems> {
    let environment = source::Environment::new(environment);
    let fields =
        source::layers(text, &environment).map_err(|problem| Problems::one(name, problem))?;
    let report = Report::default();
    let mut table = Table::new("", fields, &report);
    let server =
        table.take("server").and_then(|field| field.table()).map(Server::read).unwrap_or_default();
    let metrics = table
        .take("metrics")
        .and_then(|field| field.table())
        .map(Metrics::read)
        .unwrap_or_default();
    let admin =
        table.take("admin").and_then(|field| field.table()).map(Admin::read).unwrap_or_default();
    let kubernetes = table
        .take("kubernetes")
        .and_then(|field| field.table())
        .map(Kubernetes::read)
        .unwrap_or_default();
    let backends = match table.take("backends") {
        Some(field) => backends::read(field),
        None => BTreeMap::new(),
    };
    let routing = table
        .take("routing")
        .and_then(|field| field.table())
        .map(Routing::read)
        .unwrap_or_default();
    table.finish();
    let mut config = Config { server, metrics, admin, kubernetes, backends, routing };
    if config.backends.is_empty() {
        report.add(Problem::new(
            "backends",
            "is empty; allowed: one backend or more, such as \
            [backends.containerd] with type = \"cri\"",
        ));
    }
    checks::complete(&mut config);
    checks::check(&config, real, &report);
    report.finish(name, config).map_err(|problems| environment.name_variables(problems))
}

#[cfg(test)]
mod tests;
