//! Identity of the cell that annotations and a routing rule request.

use std::collections::BTreeMap;

use kiyot_engine::request::{RuleProviders, keys::KEYS};
use ring::digest::{Context, SHA256};

/// Returns a digest of the annotations with [`KEYS`] and of the providers that the pod's routing
/// rule allows: equal for pods that request equal cells.
pub fn identity<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    rule: Option<&RuleProviders>,
) -> String {
    let ours: BTreeMap<&str, &str> = annotations
        .into_iter()
        .filter(|(key, _)| KEYS.contains(&key.as_str()))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let mut hash = Context::new(&SHA256);
    // No key of an annotation is the name of a provider.
    let of_rule = rule.map(RuleProviders::sorted).unwrap_or_default();
    let of_rule = of_rule.into_iter().map(|provider| (provider.name(), ""));
    for (key, value) in ours.into_iter().chain(of_rule) {
        for text in [key, value] {
            hash.update(&(text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
    }
    hex::encode(hash.finish())
}
