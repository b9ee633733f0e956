//! The one decision: which backend a pod sandbox goes to. Pure.

use super::peek::{Malformed, Pod};
use crate::{
    backends::{BackendName, Declared},
    config::{Routing, Rule},
};

mod glob;

/// The annotation by which a pod asks for a backend.
pub const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";

/// Where the kubelet had the pod from; absent or `api` for one of the API server (kubernetes
/// pkg/kubelet/types).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// Labels that the DaemonSet controller, and no other, gives its pods together (kubernetes
/// pkg/controller/daemon/util).
const DAEMONSET_LABELS: [&str; 2] = ["controller-revision-hash", "pod-template-generation"];

/// A pod's annotation names a runtime that no backend declares.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {TARGET_RUNTIME} has the value {value:?}; allowed is {}", one_of(.allowed))]
pub struct UndeclaredRuntime {
    /// What the pod has.
    pub value: String,
    /// What backends and rules name.
    pub allowed: Vec<String>,
}

fn one_of(values: &[String]) -> String {
    if values.is_empty() {
        return "no value here: no backend declares one, so leave the annotation out".into();
    }
    values.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(" or ")
}

/// Why a pod goes where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason<'a> {
    /// Its annotation names a runtime that the backend declares.
    TargetRuntime,
    /// The backend declares its runtime handler.
    RuntimeHandler,
    /// The rule of this name.
    Rule(&'a str),
    /// No rule is for it.
    Default,
    /// The request could not be read: the node says so in its own words.
    Malformed,
}

/// Where a pod goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The backend's name.
    pub backend: &'a str,
    /// Why.
    pub reason: Reason<'a>,
}

/// Decides for a pod. `declared` has what each backend calls its own, `node` is the node backend's
/// name.
///
/// A declared target runtime wins over a declared runtime handler, both over the rules; of these
/// the first that matches wins, and the default is last.
pub fn decide<'a>(
    pod: Pod<'_>,
    declared: &[(&'a BackendName, Declared)],
    routing: &'a Routing,
    node: &'a BackendName,
) -> Result<Decision<'a>, UndeclaredRuntime> {
    match evaluate(pod, declared, routing) {
        Ok(decision) => decision,
        Err(Malformed) => Ok(Decision { backend: node.as_str(), reason: Reason::Malformed }),
    }
}

fn evaluate<'a>(
    pod: Pod<'_>,
    declared: &[(&'a BackendName, Declared)],
    routing: &'a Routing,
) -> Result<Result<Decision<'a>, UndeclaredRuntime>, Malformed> {
    if let Some(value) = pod.annotation(TARGET_RUNTIME)? {
        if let Some((name, _)) =
            declared.iter().find(|(_, declared)| declared.target_runtimes.contains(&value))
        {
            return Ok(Ok(Decision { backend: name.as_str(), reason: Reason::TargetRuntime }));
        }
        // A rule that names a value declares it for its backend.
        let of_rules =
            || routing.rules.iter().filter_map(|rule| rule.annotation.get(TARGET_RUNTIME));
        if !of_rules().any(|known| known == value) {
            let of_backends = declared
                .iter()
                .flat_map(|(_, declared)| declared.target_runtimes)
                .map(ToString::to_string);
            let mut allowed: Vec<_> = of_backends.chain(of_rules().cloned()).collect();
            allowed.sort();
            allowed.dedup();
            return Ok(Err(UndeclaredRuntime { value: value.into(), allowed }));
        }
    }
    let handler = pod.runtime_handler()?;
    if let Some((name, _)) =
        declared.iter().find(|(_, declared)| declared.runtime_handlers.contains(&handler))
    {
        return Ok(Ok(Decision { backend: name.as_str(), reason: Reason::RuntimeHandler }));
    }
    for rule in &routing.rules {
        if matches(rule, pod)? {
            return Ok(Ok(Decision { backend: &rule.backend, reason: Reason::Rule(&rule.name) }));
        }
    }
    Ok(Ok(Decision { backend: &routing.default, reason: Reason::Default }))
}

/// Whether all conditions of a rule hold for a pod.
fn matches(rule: &Rule, pod: Pod<'_>) -> Result<bool, Malformed> {
    for (key, value) in &rule.annotation {
        if pod.annotation(key)? != Some(value) {
            return Ok(false);
        }
    }
    for (key, value) in &rule.label {
        if pod.label(key)? != Some(value) {
            return Ok(false);
        }
    }
    if !rule.namespace.is_empty() {
        let namespace = pod.namespace()?;
        if !rule.namespace.iter().any(|pattern| glob::matches(pattern, namespace)) {
            return Ok(false);
        }
    }
    if let Some(handler) = &rule.runtime_handler
        && pod.runtime_handler()? != handler
    {
        return Ok(false);
    }
    if let Some(wanted) = rule.daemonset
        && is_daemonset(pod)? != wanted
    {
        return Ok(false);
    }
    if let Some(wanted) = rule.static_pod
        && is_static(pod)? != wanted
    {
        return Ok(false);
    }
    Ok(true)
}

fn is_daemonset(pod: Pod<'_>) -> Result<bool, Malformed> {
    for label in DAEMONSET_LABELS {
        if pod.label(label)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_static(pod: Pod<'_>) -> Result<bool, Malformed> {
    Ok(pod.annotation(CONFIG_SOURCE)?.is_some_and(|source| source != "api"))
}

#[cfg(test)]
mod tests;
