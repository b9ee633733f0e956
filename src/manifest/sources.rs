//! ConfigMaps and Secrets of a manifest, and the files that volumes make of them.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};

use super::{Content, KeyedFile, Metadata, Purpose, metadata::dns_name};
use crate::problems::{Field, Problem, Table};

/// Default mode of files.
const DEFAULT_MODE: u32 = 0o644;
const MAX_MODE: u32 = 0o777;

/// ConfigMaps and Secrets of a manifest.
#[derive(Debug, Default)]
pub(super) struct Sources(BTreeMap<Name, BTreeMap<String, Content>>);

/// Kind, namespace and name.
type Name = (String, String, String);

impl Sources {
    /// Adds an object.
    pub(super) fn read(&mut self, kind: &str, mut table: Table<'_>, purpose: Purpose) {
        let metadata = Metadata::read(&mut table, purpose);
        let secret = kind == "Secret";
        let (plain, encoded) = if secret { ("stringData", "data") } else { ("data", "binaryData") };
        let mut keys = BTreeMap::new();
        for (key, field) in table
            .take(encoded)
            .map(|field| if secret { field.secret() } else { field }.entries())
            .unwrap_or_default()
        {
            let content =
                field.read("a text in base64", |text| BASE64_STANDARD.decode(text.trim()).ok());
            keys.extend(content.map(|content| (key, Content(content))));
        }
        for (key, field) in table
            .take(plain)
            .map(|field| if secret { field.secret() } else { field }.entries())
            .unwrap_or_default()
        {
            keys.extend(field.text().map(|text| (key, Content(text.into_bytes()))));
        }
        // For the API server.
        table.take("immutable");
        if secret {
            table.take("type");
        }
        let (at, report) = (table.at().to_owned(), table.report());
        table.finish();
        let name = (kind.to_owned(), metadata.namespace, metadata.name);
        if self.0.contains_key(&name) {
            report.add(Problem::new(
                at,
                format!("is another {kind} {}/{}; allowed: one", name.1, name.2),
            ));
        }
        self.0.insert(name, keys);
    }

    /// Returns the content of an object by key.
    pub(super) fn keys(
        &self,
        kind: &str,
        namespace: &str,
        name: &str,
    ) -> Option<&BTreeMap<String, Content>> {
        self.0.get(&(kind.to_owned(), namespace.to_owned(), name.to_owned()))
    }

    /// Returns the files of a volume. Explaining takes an object of the cluster for empty.
    pub(super) fn files(
        &self,
        kind: &str,
        name_key: &'static str,
        namespace: &str,
        mut table: Table<'_>,
        purpose: Purpose,
    ) -> Option<Vec<KeyedFile>> {
        let name = table.need(name_key, "the name of one in this file").and_then(dns_name);
        let optional = table.take("optional").and_then(Field::flag).unwrap_or_default();
        let default_mode = table.take("defaultMode").and_then(mode).unwrap_or(DEFAULT_MODE);
        let items = table.take("items").map(|field| {
            field
                .items()
                .into_iter()
                .filter_map(|item| item.table().and_then(read_item))
                .collect::<Vec<_>>()
        });
        let (at, report) = (table.at().to_owned(), table.report());
        table.finish();
        let name = name?;
        let Some(keys) = self.keys(kind, namespace, &name) else {
            if optional || purpose == Purpose::Explain {
                return Some(Vec::new());
            }
            report.add(absent_object(format!("{at}.{name_key}"), kind, namespace, name));
            return None;
        };
        let Some(items) = items else {
            return Some(
                keys.iter()
                    .map(|(key, content)| KeyedFile {
                        path: key.clone(),
                        mode: default_mode,
                        content: content.clone(),
                    })
                    .collect(),
            );
        };
        let mut files = Vec::new();
        for item in items {
            match keys.get(&item.key) {
                Some(content) => files.push(KeyedFile {
                    path: item.path,
                    mode: item.mode.unwrap_or(default_mode),
                    content: content.clone(),
                }),
                None if optional => {}
                None => report.add(absent_key(format!("{at}.items"), kind, &name, item.key)),
            }
        }
        Some(files)
    }
}

/// Returns the problem with a reference to an object that the manifest lacks.
pub(super) fn absent_object(at: String, kind: &str, namespace: &str, name: String) -> Problem {
    let rule =
        format!("is invalid; allowed: the name of a {kind} in this file, in namespace {namespace}");
    Problem::with_value(at, name, rule)
}

/// Returns the problem with a reference to a key that an object lacks.
pub(super) fn absent_key(at: String, kind: &str, name: &str, key: String) -> Problem {
    Problem::with_value(at, key, format!("is invalid; allowed: a key of {kind} {name}"))
}

struct Item {
    key: String,
    path: String,
    mode: Option<u32>,
}

fn read_item(mut table: Table<'_>) -> Option<Item> {
    let key = table.need("key", "a key of it").and_then(Field::text);
    let plain = |text: &str| {
        let fits = !text.is_empty()
            && !text.starts_with("..")
            && text.split('/').all(|part| !part.is_empty() && part != "..");
        fits.then(|| text.to_owned())
    };
    let path = table
        .need("path", "a relative path")
        .and_then(|field| field.read("a relative path that does not start with \"..\"", plain));
    let mode = table.take("mode").and_then(mode);
    table.finish();
    Some(Item { key: key?, path: path?, mode })
}

/// Reads permissions; YAML reads `0o644`, and by YAML 1.1 `0644`, as octal.
fn mode(field: Field<'_>) -> Option<u32> {
    field.number(0..=MAX_MODE)
}
