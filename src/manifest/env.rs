//! Environment variables of a container, as pkg/kubelet/kubelet_pods.go makes them.

use crate::problems::{Field, Table};

/// Sources of a variable's value.
const VALUE_SOURCES: [&str; 5] =
    ["configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"];

/// Fields of an item of `envFrom`.
const ENV_FROM: [&str; 3] = ["configMapRef", "prefix", "secretRef"];

/// Reads `env` and `envFrom`. Variables with a source have no value before the container is made,
/// and are left out.
pub(super) fn read(table: &mut Table<'_>) -> Vec<(String, String)> {
    for item in table.take("envFrom").map(Field::items).unwrap_or_default() {
        if let Some(mut item) = item.table() {
            item.ignore(&ENV_FROM);
            item.finish();
        }
    }
    let own = table.take("env").map(Field::items).unwrap_or_default();
    own.into_iter().filter_map(read_variable).collect()
}

/// Reads a variable, whose value may be a secret.
fn read_variable(field: Field<'_>) -> Option<(String, String)> {
    let mut table = field.table()?;
    let name = table.need("name", "a variable's name").and_then(Field::text);
    let source = table.take("valueFrom").and_then(Field::table);
    let value = table.take("value").map_or(Some(String::new()), |field| field.secret().text());
    table.finish();
    let Some(mut source) = source else { return Some((name?, value?)) };
    source.ignore(&VALUE_SOURCES);
    source.finish();
    None
}

#[cfg(test)]
mod tests;
