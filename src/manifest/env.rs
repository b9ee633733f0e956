//! Environment variables of a container, as pkg/kubelet/kubelet_pods.go makes them.

use crate::problems::{Field, Table};

/// Sources of a variable's value.
const VALUE_SOURCES: [&str; 4] =
    ["configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef"];

/// Fields of `fileKeyRef` beside `optional`.
const FILE_KEY: [&str; 3] = ["key", "path", "volumeName"];

/// Fields of an item of `envFrom`.
const ENV_FROM: [&str; 3] = ["configMapRef", "prefix", "secretRef"];

/// Variables of a container.
#[derive(Debug, Default)]
pub(super) struct Variables {
    /// Names and values, in order.
    pub(super) values: Vec<(String, String)>,
    /// Names of those in files of volumes, with `optional`.
    pub(super) in_files: Vec<(String, bool)>,
}

/// Reads `env` and `envFrom`. Variables with a source have no value before the container is made,
/// and are left out.
pub(super) fn read(table: &mut Table<'_>) -> Variables {
    for item in table.take("envFrom").map(Field::items).unwrap_or_default() {
        if let Some(mut item) = item.table() {
            item.ignore(&ENV_FROM);
            item.finish();
        }
    }
    let own = table.take("env").map(Field::items).unwrap_or_default();
    let mut variables = Variables::default();
    for field in own {
        read_variable(field, &mut variables);
    }
    variables
}

/// Reads a variable, whose value may be a secret. Returns `None` if it is left out.
fn read_variable(field: Field<'_>, into: &mut Variables) -> Option<()> {
    let mut table = field.table()?;
    let name = table.need("name", "a variable's name").and_then(Field::text);
    let source = table.take("valueFrom").and_then(Field::table);
    let value = table.take("value").map_or(Some(String::new()), |field| field.secret().text());
    table.finish();
    let Some(mut source) = source else {
        into.values.push((name?, value?));
        return Some(());
    };
    let file = source.take("fileKeyRef").and_then(Field::table);
    source.ignore(&VALUE_SOURCES);
    source.finish();
    let mut file = file?;
    let optional = file.take("optional").and_then(Field::flag).unwrap_or_default();
    file.ignore(&FILE_KEY);
    file.finish();
    into.in_files.push((name?, optional));
    Some(())
}

#[cfg(test)]
mod tests;
