//! Environment variables of a container, as in pkg/kubelet/kubelet_pods.go.

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ResourceFieldSelector};

use super::place::Place;

/// Variable whose value the kubelet reads when it creates the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvSource {
    /// Name of the variable.
    pub variable: String,
    /// Kind of the source.
    pub kind: SourceKind,
}

/// Source of a variable's value, except ConfigMaps and Secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// `fieldPath` of a field of the pod.
    Field(String),
    /// File in a volume (`fileKeyRef`), with `optional`.
    File {
        /// True if the variable may be absent.
        is_optional: bool,
    },
    /// Request or limit.
    Resource(ResourceField),
}

/// Request or limit of a container (`resourceFieldRef`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceField {
    /// Name of the container; `None` for the container of the variable.
    pub container: Option<String>,
    /// Name of the request or limit, such as `limits.cpu`.
    pub resource: String,
}

impl ResourceField {
    pub(super) fn of(selector: ResourceFieldSelector) -> Self {
        let container = selector.container_name.filter(|name| !name.is_empty());
        Self { container, resource: selector.resource }
    }
}

/// Reads a variable of `env` with a value. Returns `None` for a variable with a source, because it
/// has no value before the container is created. Variables of `envFrom` are omitted too.
pub(super) fn read(at: Place<'_>, variable: &EnvVar) -> Option<(String, String)> {
    let name = at.need("name", Some(&*variable.name), "a variable's name")?.text()?;
    variable.value_from.is_none().then(|| (name, variable.value.clone().unwrap_or_default()))
}

/// Returns the sources of variables.
pub(super) fn sources(variables: &[EnvVar]) -> Vec<EnvSource> {
    let source = |variable: &EnvVar| {
        let kind = kind(variable.value_from.as_ref()?)?;
        Some(EnvSource { variable: variable.name.clone(), kind })
    };
    variables.iter().filter_map(source).collect()
}

fn kind(source: &EnvVarSource) -> Option<SourceKind> {
    let field = source.field_ref.as_ref().map(|it| SourceKind::Field(it.field_path.clone()));
    let file = || {
        let file = source.file_key_ref.as_ref()?;
        Some(SourceKind::File { is_optional: file.optional.unwrap_or_default() })
    };
    let resource = || {
        let selector = source.resource_field_ref.clone()?;
        Some(SourceKind::Resource(ResourceField::of(selector)))
    };
    field.or_else(file).or_else(resource)
}

#[cfg(test)]
mod tests;
