//! Environment variables of a container.

use super::Purpose;
use crate::problems::{Field, Table};

/// Sources of a variable's value.
const VALUE_SOURCES: [&str; 5] =
    ["configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"];

/// Fields of an item of `envFrom`.
const ENV_FROM: [&str; 3] = ["configMapRef", "prefix", "secretRef"];

/// Reads `env` and `envFrom`: the variables with a value of their own, in order.
pub(super) fn read(table: &mut Table<'_>, purpose: Purpose) -> Vec<(String, String)> {
    for item in purpose.take(table, "envFrom").map(Field::items).unwrap_or_default() {
        if let Some(mut item) = item.table() {
            item.ignore(&ENV_FROM);
            item.finish();
        }
    }
    let variables = table.take("env").map(Field::items).unwrap_or_default();
    variables.into_iter().filter_map(|field| variable(field, purpose)).collect()
}

/// Reads a variable, whose value may be a secret.
fn variable(field: Field<'_>, purpose: Purpose) -> Option<(String, String)> {
    let mut table = field.table()?;
    let name = table.need("name", "a variable's name").and_then(Field::text);
    let source = purpose.take(&mut table, "valueFrom").and_then(Field::table);
    let has_source = source.is_some();
    if let Some(mut source) = source {
        source.ignore(&VALUE_SOURCES);
        source.finish();
    }
    let value = table.take("value").map_or(Some(String::new()), |field| field.secret().text());
    table.finish();
    // The kubelet finds the value of a source when it starts the container.
    if has_source { None } else { Some((name?, value?)) }
}
