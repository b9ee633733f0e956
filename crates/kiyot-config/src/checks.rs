//! Checks and defaults across keys.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use kiyot_values::problems::{Problem, Report};

use super::{
    BackendConfig, Config, MilpaBackend, ProviderKind, Rule, read::SOCKET_PATH_BYTES, sockets,
};

/// Path of the gateway's socket in a state directory.
const GATEWAY_SOCKET: &str = "/gateway.sock";

/// Sets defaults that follow from other keys: the node's backend if only one backend has the type
/// `cri`, and the containerd from which images are copied.
pub(super) fn complete(config: &mut Config) {
    config.admin.complete(&config.server);
    let cri: Vec<_> = config
        .backends
        .iter()
        .filter_map(|(name, backend)| matches!(backend, BackendConfig::Cri(_)).then_some(name))
        .collect();
    if let (None, [only]) = (&config.server.node_backend, cri.as_slice()) {
        config.server.node_backend = Some((*only).clone());
    }
    let socket =
        match config.server.node_backend.as_ref().and_then(|name| config.backends.get(name)) {
            Some(BackendConfig::Cri(node)) => node.socket.clone(),
            _ => MilpaBackend::default().node_containerd,
        };
    for backend in config.backends.values_mut() {
        if let BackendConfig::Milpa(milpa) = backend
            && milpa.node_containerd.as_os_str().is_empty()
        {
            milpa.node_containerd.clone_from(&socket);
        }
    }
}

/// Reports keys that contradict each other.
pub(super) fn check(config: &Config, real: &dyn Fn(&Path) -> PathBuf, report: &Report) {
    check_node_backend(config, report);
    check_routing(config, report);
    check_paths(config, report);
    sockets::check(config, real, report);
    for (name, backend) in &config.backends {
        if let BackendConfig::Milpa(milpa) = backend
            && milpa.token_ttl < milpa.launch_timeout
        {
            let rule = format!(
                "is invalid; allowed: at least launch_timeout ({:?}), because a cell uses its \
                 token until then",
                milpa.launch_timeout
            );
            report.add(Problem::with_value(
                format!("backends.{name}.token_ttl"),
                format!("{:?}", milpa.token_ttl),
                rule,
            ));
        }
    }
    for (name, backend) in &config.backends {
        if let BackendConfig::Milpa(milpa) = backend {
            check_warm(name, milpa, report);
            check_providers(config, name, milpa, report);
        }
    }
    let milpas: Vec<_> = config
        .backends
        .iter()
        .filter(|(_, backend)| matches!(backend, BackendConfig::Milpa(_)))
        .map(|(name, _)| name.as_str())
        .collect();
    if milpas.len() > 1 {
        report.add(Problem::new(
            "backends",
            format!("has several of type \"milpa\" ({}); allowed: one", milpas.join(", ")),
        ));
    }
}

/// Reports absent keys that the providers of a backend need.
pub(super) fn check_providers(config: &Config, name: &str, milpa: &MilpaBackend, report: &Report) {
    let at = format!("backends.{name}.gateway");
    milpa.gateway.check(&at, milpa.has_remote_cells(), report);
    if milpa.has_remote_cells() && milpa.cluster.is_none() {
        let rule = "is missing; the provider's instances are found by their owner, which is this \
                    name and the node's: a name such as \"production\"";
        report.add(Problem::new(format!("backends.{name}.cluster"), rule));
    }
    if config.kubernetes.derives_capacity() && !milpa.has_remote_cells() {
        let rule = "needs cells on other machines; allowed: with the provider \"ec2\", otherwise \
                    explicit figures";
        report.add(Problem::new("kubernetes.capacity.derived", rule));
    }
    if milpa.has(ProviderKind::Ec2) {
        let knows_node = milpa.gateway.node_address().is_some();
        milpa.ec2.check(&format!("backends.{name}.ec2"), knows_node, report);
    }
}

/// Reports repeated pools, and pools that exceed the limits.
fn check_warm(name: &str, milpa: &MilpaBackend, report: &Report) {
    let at = |index: usize, key: &str| format!("backends.{name}.warm[{index}]{key}");
    let mut cells = 0_usize;
    for (index, pool) in milpa.warm.iter().enumerate() {
        let identity = pool.to_string();
        if milpa.warm[..index].iter().any(|earlier| earlier.to_string() == identity) {
            let rule = format!("is a second pool of {identity}; allowed: one");
            report.add(Problem::new(at(index, ""), rule));
        }
        if let Some(provider) = pool.provider.filter(|provider| !milpa.has(*provider)) {
            let rule = "is not configured; allowed: one of providers";
            let value = format!("{:?}", provider.name());
            report.add(Problem::with_value(at(index, ".provider"), value, rule));
        }
        cells = cells.saturating_add(pool.count);
        if cells > milpa.max_cells {
            let rule = format!(
                "makes {cells} cells in all pools; allowed: at most max_cells ({})",
                milpa.max_cells
            );
            let count = pool.count.to_string();
            report.add(Problem::with_value(at(index, ".count"), count, rule));
            return;
        }
    }
}

fn check_node_backend(config: &Config, report: &Report) {
    let cri = names(config, |backend| matches!(backend, BackendConfig::Cri(_)));
    match &config.server.node_backend {
        Some(name) if !matches!(config.backends.get(name), Some(BackendConfig::Cri(_))) => {
            report.add(Problem::with_value(
                "server.node_backend",
                format!("{name:?}"),
                format!("is invalid; allowed: a backend of type \"cri\": {cri}"),
            ));
        }
        None if !config.backends.is_empty() => {
            let rule = if cri.is_empty() {
                "is missing; allowed: a backend of type \"cri\", which answers for the node"
                    .to_owned()
            } else {
                format!("is missing; with several backends of type \"cri\", allowed: {cri}")
            };
            report.add(Problem::new("server.node_backend", rule));
        }
        _ => {}
    }
}

fn check_routing(config: &Config, report: &Report) {
    let all = names(config, |_| true);
    let known = |name: &String| config.backends.contains_key(name) || config.backends.is_empty();
    if !known(&config.routing.default) {
        report.add(Problem::with_value(
            "routing.default",
            format!("{:?}", config.routing.default),
            format!("is invalid; allowed: the name of a backend: {all}"),
        ));
    }
    let mut seen = BTreeSet::new();
    for (index, rule) in config.routing.rules.iter().enumerate() {
        let at = format!("routing.rule[{index}]");
        // An absent backend is reported already.
        if !rule.backend.is_empty() && !known(&rule.backend) {
            report.add(Problem::with_value(
                format!("{at}.backend"),
                format!("{:?}", rule.backend),
                format!("is invalid; allowed: the name of a backend: {all}"),
            ));
        }
        if !rule.name.is_empty() && !seen.insert(&rule.name) {
            report.add(Problem::with_value(
                format!("{at}.name"),
                format!("{:?}", rule.name),
                "is the name of another rule too; allowed: a unique name",
            ));
        }
        if !rule.has_condition() {
            let rule = "has no condition; allowed: one or more of annotation, label, namespace, \
                        runtime_handler, daemonset, static (for all pods there is routing.default)";
            report.add(Problem::new(&at, rule));
        }
        check_rule_providers(config, &format!("{at}.providers"), rule, report);
    }
}

/// Reports providers of a rule that its backend lacks.
fn check_rule_providers(config: &Config, at: &str, rule: &Rule, report: &Report) {
    let Rule { name, backend, providers, .. } = rule;
    match config.backends.get(backend) {
        Some(BackendConfig::Milpa(milpa)) => {
            let allowed: Vec<_> =
                milpa.providers.iter().map(|it| format!("{:?}", it.name())).collect();
            for absent in rule.absent_providers(&config.backends) {
                let rule = format!(
                    "is not a provider of backend {backend:?}, to which rule {name:?} leads; \
                     allowed: {}",
                    allowed.join(", ")
                );
                report.add(Problem::with_value(at, format!("{:?}", absent.name()), rule));
            }
        }
        Some(BackendConfig::Cri(_)) if !providers.is_empty() => {
            let rule = format!(
                "is for cells, and rule {name:?} leads to backend {backend:?} on the node; \
                 allowed: with a backend of type \"milpa\""
            );
            report.add(Problem::new(at, rule));
        }
        Some(BackendConfig::Cri(_)) | None => {}
    }
}

fn check_paths(config: &Config, report: &Report) {
    let (link, socket) = (&config.admin.listen, config.admin.socket());
    if let Some(over @ 1..) = socket.as_os_str().len().checked_sub(SOCKET_PATH_BYTES) {
        let room = link.as_os_str().len() - over;
        let rule = format!("is too long for the socket behind it; allowed: {room} bytes");
        report.add(Problem::with_value("admin.listen", format!("{link:?}"), rule));
    }
    for (name, backend) in &config.backends {
        if let BackendConfig::Milpa(milpa) = backend {
            let room = SOCKET_PATH_BYTES - GATEWAY_SOCKET.len();
            if milpa.state_dir.as_os_str().len() > room {
                let rule = format!("is too long for the sockets in it; allowed: {room} bytes");
                report.add(Problem::with_value(
                    format!("backends.{name}.state_dir"),
                    format!("{:?}", milpa.state_dir),
                    rule,
                ));
            }
        }
    }
}

fn names(config: &Config, which: impl Fn(&BackendConfig) -> bool) -> String {
    config
        .backends
        .iter()
        .filter(|(_, backend)| which(backend))
        .map(|(name, _)| name.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}
