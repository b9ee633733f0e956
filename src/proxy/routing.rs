//! Routing of pod sandboxes to backends. Pure.

use kiyot_config::{Routing, Rule};
use kiyot_engine::request::RuleProviders;
use kiyot_values::glob;

use super::peek::{Malformed, Pod};
use crate::backends::{BackendName, Declared};

/// Annotation by which a pod requests a backend.
pub const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";

/// Annotation that holds a pod's source; absent or `api` for pods of the API server (kubernetes
/// pkg/kubelet/types).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// Labels that only the DaemonSet controller sets together (kubernetes
/// pkg/controller/daemon/util).
const DAEMONSET_LABELS: [&str; 2] = ["controller-revision-hash", "pod-template-generation"];

/// A pod that no backend may run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// A pod's annotation names a runtime that no backend declares.
    #[error("annotation {TARGET_RUNTIME} has the value {value:?}; allowed is {}", one_of(.allowed))]
    UndeclaredRuntime {
        /// The value of the pod's annotation.
        value: String,
        /// The values that backends and rules name.
        allowed: Vec<String>,
    },
    /// A pod's annotation leads to a backend that does not have the pod's runtime handler.
    #[error(
        "annotation {TARGET_RUNTIME} with the value {value:?} leads to backend {backend:?}, which \
         does not declare the runtime handler {handler:?}; allowed: the annotation alone, \
         the handler alone, the handler {}, or a rule with runtime_handler = {handler:?} to the \
         backend", one_of(.allowed)
    )]
    ForeignHandler {
        /// The value of the pod's annotation.
        value: String,
        /// The name of the backend.
        backend: String,
        /// The pod's runtime handler.
        handler: String,
        /// The handlers that the backend declares.
        allowed: Vec<String>,
    },
}

fn one_of(values: &[String]) -> String {
    if values.is_empty() {
        return "no value here: no backend declares one, so leave the annotation out".into();
    }
    values.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(" or ")
}

/// The reason of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason<'a> {
    /// The pod's annotation names a target runtime that the backend declares.
    TargetRuntime,
    /// The backend declares the pod's runtime handler.
    RuntimeHandler,
    /// The rule of this name matches.
    Rule(&'a str),
    /// No rule matches.
    Default,
    /// A rule or the default was skipped, because its backend does not have the pod's runtime
    /// handler.
    ForeignHandler,
    /// The request is malformed. The node backend answers with an error.
    Malformed,
}

/// A routing decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The backend's name.
    pub backend: &'a str,
    /// The reason.
    pub reason: Reason<'a>,
    /// The rule that decided; `None` if no rule did.
    pub rule: Option<&'a Rule>,
}

impl<'a> Decision<'a> {
    fn new(backend: &'a str, reason: Reason<'a>) -> Self {
        Self { backend, reason, rule: None }
    }

    fn by(rule: &'a Rule) -> Self {
        Self { backend: &rule.backend, reason: Reason::Rule(&rule.name), rule: Some(rule) }
    }

    /// Returns the providers to which the rule limits the pod's cell; `None` for all.
    pub fn providers(&self) -> Option<RuleProviders> {
        self.rule.and_then(RuleProviders::of)
    }
}

/// Decides which backend runs a pod. `declared` has the declarations of each backend, `node` is the
/// name of the node backend.
///
/// A declared target runtime wins over a declared runtime handler, and both win over rules. The
/// first matching rule wins over the default.
///
/// A runtime handler that no backend declares is foreign. A backend that declares handlers (cells)
/// runs a pod with a foreign handler only if a rule with this handler leads to it. Container
/// runtimes declare no handlers and refuse unknown ones. The last resort is the node backend.
pub fn decide<'a>(
    pod: Pod<'_>,
    declared: &[(&'a BackendName, Declared)],
    routing: &'a Routing,
    node: &'a BackendName,
) -> Result<Decision<'a>, RoutingError> {
    match evaluate(pod, declared, routing, node) {
        Ok(decision) => decision,
        Err(Malformed) => Ok(Decision::new(node.as_str(), Reason::Malformed)),
    }
}

fn evaluate<'a>(
    pod: Pod<'_>,
    declared: &[(&'a BackendName, Declared)],
    routing: &'a Routing,
    node: &'a BackendName,
) -> Result<Result<Decision<'a>, RoutingError>, Malformed> {
    let handler = pod.runtime_handler()?;
    let handlers_of = |backend: &str| {
        let of_name = declared.iter().find(|(name, _)| name.as_str() == backend);
        of_name.map_or(&[][..], |(_, declared)| declared.runtime_handlers)
    };
    let of_handler = declared.iter().find(|(_, of)| of.runtime_handlers.contains(&handler));
    let is_foreign_to =
        |backend| !handler.is_empty() && of_handler.is_none() && !handlers_of(backend).is_empty();
    let names_handler = |rule: &Rule| rule.runtime_handler.as_deref() == Some(handler);
    let contradiction = |value: &str, backend: &str| RoutingError::ForeignHandler {
        value: value.to_owned(),
        backend: backend.to_owned(),
        handler: handler.to_owned(),
        allowed: handlers_of(backend).iter().map(ToString::to_string).collect(),
    };
    if let Some(value) = pod.annotation(TARGET_RUNTIME)? {
        if let Some((name, _)) = declared.iter().find(|(_, of)| of.target_runtimes.contains(&value))
        {
            let backend = name.as_str();
            if is_foreign_to(backend) {
                let to_backend = |rule: &&Rule| rule.backend == backend && names_handler(rule);
                for rule in routing.rules.iter().filter(to_backend) {
                    if matches(rule, pod)? {
                        return Ok(Ok(Decision::by(rule)));
                    }
                }
                return Ok(Err(contradiction(value, backend)));
            }
            return Ok(Ok(Decision::new(backend, Reason::TargetRuntime)));
        }
        // A rule declares the value that it names.
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
            return Ok(Err(RoutingError::UndeclaredRuntime { value: value.into(), allowed }));
        }
    }
    if let Some((name, _)) = of_handler {
        return Ok(Ok(Decision::new(name.as_str(), Reason::RuntimeHandler)));
    }
    let mut skipped = false;
    for rule in &routing.rules {
        if !matches(rule, pod)? {
            continue;
        }
        if names_handler(rule) || !is_foreign_to(&rule.backend) {
            return Ok(Ok(Decision::by(rule)));
        }
        if let Some(value) = rule.annotation.get(TARGET_RUNTIME) {
            return Ok(Err(contradiction(value, &rule.backend)));
        }
        skipped = true;
    }
    let (backend, skipped) = if is_foreign_to(&routing.default) {
        (node.as_str(), true)
    } else {
        (routing.default.as_str(), skipped)
    };
    let reason = if skipped { Reason::ForeignHandler } else { Reason::Default };
    Ok(Ok(Decision::new(backend, reason)))
}

/// Returns whether all conditions of a rule match a pod.
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
