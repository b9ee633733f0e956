//! Environment variables of a container, as pkg/kubelet/kubelet_pods.go makes them.

use k8s_openapi::api::core::v1::EnvVar;

use super::place::Place;

/// Reads a variable of `env`. Variables with a source have no value before the container is made,
/// and are left out, as those of `envFrom` are.
pub(super) fn read(at: Place<'_>, variable: EnvVar) -> Option<(String, String)> {
    let name = at.need("name", Some(variable.name), "a variable's name")?.text()?;
    let value = variable.value.unwrap_or_default();
    variable.value_from.is_none().then_some((name, value))
}

#[cfg(test)]
mod tests;
