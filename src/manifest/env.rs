//! Environment variables of a container, as pkg/kubelet/kubelet_pods.go makes them.

use crate::problems::{Field, Table};

/// Sources of a variable's value.
const VALUE_SOURCES: [&str; 5] =
    ["configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"];

/// Fields of an item of `envFrom`.
const ENV_FROM: [&str; 3] = ["configMapRef", "prefix", "secretRef"];

/// Variable whose value the kubelet reads when it makes the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvSource {
    /// Name of the variable.
    pub variable: String,
    /// Key of the source in `valueFrom`, such as `fieldRef`.
    pub kind: &'static str,
    /// `fieldPath` or `resource`; empty for other kinds.
    pub of: String,
}

/// Variable with its value or its source.
enum Variable {
    Value(String, String),
    Source(EnvSource),
}

/// Reads `env` and `envFrom`: variables with a value, and those of `env` with a source, which have
/// no value before the container is made.
pub(super) fn read(table: &mut Table<'_>) -> (Vec<(String, String)>, Vec<EnvSource>) {
    for item in table.take("envFrom").map(Field::items).unwrap_or_default() {
        if let Some(mut item) = item.table() {
            item.ignore(&ENV_FROM);
            item.finish();
        }
    }
    let (mut values, mut sources) = (Vec::new(), Vec::new());
    for field in table.take("env").map(Field::items).unwrap_or_default() {
        match read_variable(field) {
            Some(Variable::Value(name, value)) => values.push((name, value)),
            Some(Variable::Source(source)) => sources.push(source),
            None => {}
        }
    }
    (values, sources)
}

/// Reads a variable, whose value may be a secret.
fn read_variable(field: Field<'_>) -> Option<Variable> {
    let mut table = field.table()?;
    let name = table.need("name", "a variable's name").and_then(Field::text);
    let source = table.take("valueFrom").and_then(Field::table);
    let value = table.take("value").map_or(Some(String::new()), |field| field.secret().text());
    table.finish();
    let Some(mut source) = source else { return Some(Variable::Value(name?, value?)) };
    let kind = VALUE_SOURCES.into_iter().find(|kind| source.has(kind));
    let key = match kind {
        Some("fieldRef") => Some("fieldPath"),
        Some("resourceFieldRef") => Some("resource"),
        _ => None,
    };
    let of = key.and_then(|key| source.take(kind?)?.table()?.take(key)?.text());
    source.ignore(&VALUE_SOURCES);
    source.finish();
    Some(Variable::Source(EnvSource { variable: name?, kind: kind?, of: of.unwrap_or_default() }))
}

#[cfg(test)]
mod tests;
