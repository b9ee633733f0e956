//! Server-side apply: the owners of fields, as in `managedFields`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// The path of a field: keys of maps, down to a value that is not a map. Lists are atomic, except
/// lists with a key; the key names their items.
type FieldPath = Vec<String>;

/// The owners of an object's fields: paths by manager and subresource.
pub(super) type Owners = BTreeMap<(String, String), BTreeSet<FieldPath>>;

/// A field that another manager owns.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Owned {
    pub(super) manager: String,
    pub(super) field: String,
}

/// Applies the fields of `applied` to an object. A field that the manager applied earlier and now
/// omits is removed, unless another manager owns it.
pub(super) fn apply(
    object: &mut Value,
    owners: &mut Owners,
    (manager, subresource): (&str, &str),
    applied: &Value,
    is_forced: bool,
) -> Result<(), Vec<Owned>> {
    let mut fields = BTreeMap::new();
    leaves(applied, &mut Vec::new(), &mut fields);
    let own = (manager.to_owned(), subresource.to_owned());
    let mut conflicts = Vec::new();
    for (path, value) in &fields {
        let is_changed = at(object, path) != Some(value);
        for (other, paths) in owners.iter_mut().filter(|(other, _)| **other != own) {
            if !is_changed || !paths.contains(path) {
                continue;
            }
            if is_forced {
                paths.remove(path);
            } else {
                conflicts.push(Owned { manager: other.0.clone(), field: path.join(".") });
            }
        }
    }
    if !conflicts.is_empty() {
        return Err(conflicts);
    }
    let earlier = owners.insert(own.clone(), fields.keys().cloned().collect());
    for path in earlier.unwrap_or_default() {
        let is_owned = owners.values().any(|paths| paths.contains(&path));
        if !is_owned {
            remove(object, &path);
        }
    }
    for (path, value) in fields {
        set(object, &path, value);
    }
    Ok(())
}

fn leaves(value: &Value, path: &mut FieldPath, found: &mut BTreeMap<FieldPath, Value>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                path.push(key.clone());
                leaves(value, path, found);
                path.pop();
            }
        }
        // An object without fields applies nothing.
        _ if path.is_empty() => {}
        leaf => {
            found.insert(path.clone(), leaf.clone());
        }
    }
}

fn at<'v>(value: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(value, |value, key| value.get(key))
}

fn set(value: &mut Value, path: &[String], new: Value) {
    let Some((key, rest)) = path.split_first() else {
        *value = new;
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    if let Some(fields) = value.as_object_mut() {
        set(fields.entry(key.clone()).or_insert(Value::Null), rest, new);
    }
}

fn remove(value: &mut Value, path: &[String]) {
    let Some((last, parents)) = path.split_last() else { return };
    let parent = parents.iter().try_fold(value, |value, key| value.get_mut(key));
    if let Some(fields) = parent.and_then(Value::as_object_mut) {
        fields.remove(last);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_left_out_are_removed_and_fields_of_others_conflict() {
        let (mut object, mut owners) = (json!({}), Owners::new());
        let mut by = |manager: &str, applied: Value, is_forced: bool| {
            let outcome = apply(&mut object, &mut owners, (manager, ""), &applied, is_forced);
            (outcome.is_ok(), object.clone())
        };
        assert!(by("a", json!({ "x": 1, "y": { "z": 2 } }), false).0);
        let (is_applied, object) = by("a", json!({ "x": 1 }), false);
        assert!(is_applied && object == json!({ "x": 1, "y": {} }), "{object}");
        // Both managers own an equal value; a different value is a conflict.
        assert!(by("b", json!({ "x": 1 }), false).0);
        assert!(!by("b", json!({ "x": 2 }), false).0);
        let (is_applied, object) = by("b", json!({ "x": 2 }), true);
        assert!(is_applied && object["x"] == 2, "{object}");
        // The first manager owns no fields any more, so that none are removed.
        assert_eq!(by("a", json!({}), false).1["x"], 2);
    }
}
