//! Identity of the cell that annotations request.

use std::collections::BTreeMap;

use kiyot_engine::request::keys::KEYS;
use ring::digest::{Context, SHA256};

/// Returns a digest of the annotations with [`KEYS`]: equal for pods that request equal cells.
pub fn identity<'a>(annotations: impl IntoIterator<Item = (&'a String, &'a String)>) -> String {
    let ours: BTreeMap<&str, &str> = annotations
        .into_iter()
        .filter(|(key, _)| KEYS.contains(&key.as_str()))
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let mut hash = Context::new(&SHA256);
    for (key, value) in ours {
        for text in [key, value] {
            hash.update(&(text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
    }
    hex::encode(hash.finish())
}
