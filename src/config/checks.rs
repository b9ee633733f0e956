//! What one key says about another.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use super::{BackendConfig, Config, MilpaBackend, read::SOCKET_PATH_BYTES, sockets};
use crate::problems::{Problem, Report};

/// The gateway's socket in a state directory, without its directory.
const LONGEST_SOCKET_IN_STATE_DIR: &str = "/gateway.sock";

/// Sets what follows from other keys: the node's backend if it is the only one of its kind, and the
/// containerd whose images are copied.
pub(super) fn complete(config: &mut Config) {
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

/// Notes what does not fit together.
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
                "allowed is launch_timeout ({:?}) at least: a cell must be able to use its token until then",
                milpa.launch_timeout
            );
            report.add(Problem::with_value(
                format!("backends.{name}.token_ttl"),
                format!("{:?}", milpa.token_ttl),
                rule,
            ));
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
            format!("has several of type \"milpa\" ({}); allowed is one", milpas.join(", ")),
        ));
    }
}

fn check_node_backend(config: &Config, report: &Report) {
    let cri = names(config, |backend| matches!(backend, BackendConfig::Cri(_)));
    match &config.server.node_backend {
        Some(name) if !matches!(config.backends.get(name), Some(BackendConfig::Cri(_))) => {
            report.add(Problem::with_value(
                "server.node_backend",
                format!("{name:?}"),
                format!("allowed is a backend of type \"cri\": {cri}"),
            ));
        }
        None if !config.backends.is_empty() => {
            let rule = if cri.is_empty() {
                "there is no backend of type \"cri\", and one must answer for the node".to_owned()
            } else {
                format!(
                    "is missing; with several backends of type \"cri\", allowed is one of: {cri}"
                )
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
            format!("allowed is the name of a backend: {all}"),
        ));
    }
    let mut seen = BTreeSet::new();
    for (index, rule) in config.routing.rules.iter().enumerate() {
        let at = format!("routing.rule[{index}]");
        // An empty one is missing, which has been said.
        if !rule.backend.is_empty() && !known(&rule.backend) {
            report.add(Problem::with_value(
                format!("{at}.backend"),
                format!("{:?}", rule.backend),
                format!("allowed is the name of a backend: {all}"),
            ));
        }
        if !rule.name.is_empty() && !seen.insert(&rule.name) {
            report.add(Problem::with_value(
                format!("{at}.name"),
                format!("{:?}", rule.name),
                "another rule has this name; allowed is one of its own",
            ));
        }
        if !rule.has_condition() {
            let rule = "has no condition; allowed is one or more of annotation, label, namespace, runtime_handler, daemonset, static (for all pods there is routing.default)";
            report.add(Problem::new(at, rule));
        }
    }
}

fn check_paths(config: &Config, report: &Report) {
    for (name, backend) in &config.backends {
        if let BackendConfig::Milpa(milpa) = backend {
            let room = SOCKET_PATH_BYTES - LONGEST_SOCKET_IN_STATE_DIR.len();
            if milpa.state_dir.as_os_str().len() > room {
                let rule = format!("is too long for the sockets in it; allowed are {room} bytes");
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
