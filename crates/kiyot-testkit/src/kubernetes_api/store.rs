//! The objects of the API server, with their versions and changes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{
    apply::{self, Owners},
    request::{ApiRequest, Verb},
    schema,
};

/// A refusal of a request.
#[derive(Debug)]
pub(super) struct ApiRefusal {
    pub(super) code: u16,
    reason: String,
    message: String,
}

impl ApiRefusal {
    pub(super) fn of(code: u16, reason: &str, message: &str) -> Self {
        Self { code, reason: reason.to_owned(), message: message.to_owned() }
    }

    pub(super) fn not_found(name: &str) -> Self {
        Self::of(404, "NotFound", &format!("{name:?} not found"))
    }

    pub(super) fn forbidden(request: &ApiRequest) -> Self {
        let ApiRequest { resource, group, verb, .. } = request;
        let message = format!(
            "{resource}.{group} is forbidden: User \"system:serviceaccount:kiyot:kiyot\" cannot \
             {} resource {resource:?} in API group {group:?} at the cluster scope",
            verb.word()
        );
        Self::of(403, "Forbidden", &message)
    }

    /// Returns the object `Status` of the refusal.
    pub(super) fn status(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}

#[derive(Debug, Default)]
struct Stored {
    object: Value,
    owners: Owners,
}

/// A change, for watches.
#[derive(Debug)]
struct Change {
    version: u64,
    resource: String,
    kind: &'static str,
    object: Value,
}

/// All objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    version: u64,
    compacted: u64,
    uids: u64,
    schemas: BTreeMap<String, Value>,
    /// The resources with a status subresource.
    with_status: BTreeSet<String>,
    stored: BTreeMap<(String, String), Stored>,
    changes: Vec<Change>,
}

/// Resources without a definition.
const BUILT_IN: [&str; 3] = ["pods", "events", "nodes"];

impl Objects {
    /// Adds the resource of a CustomResourceDefinition.
    pub(super) fn define(&mut self, definition: &Value) {
        let plural = definition["spec"]["names"]["plural"].as_str().unwrap();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        self.schemas.insert(plural.to_owned(), schema.clone());
        if definition["spec"]["versions"][0]["subresources"]["status"].is_object() {
            self.with_status.insert(plural.to_owned());
        } else {
            self.with_status.remove(plural);
        }
    }

    pub(super) fn all(&self, resource: &str) -> BTreeMap<String, Value> {
        let of = self.stored.iter().filter(|((own, _), _)| own == resource);
        of.map(|((_, key), stored)| (key.clone(), stored.object.clone())).collect()
    }

    pub(super) fn put(&mut self, resource: &str, object: Value) {
        let key = key_of(&object);
        let stored = self.stored.remove(&(resource.to_owned(), key.clone()));
        let owners = stored.map(|stored| stored.owners).unwrap_or_default();
        self.store(resource, &key, Stored { object, owners });
    }

    pub(super) fn remove(&mut self, resource: &str, key: &str) {
        if let Some(stored) = self.stored.remove(&(resource.to_owned(), key.to_owned())) {
            self.version += 1;
            let mut object = stored.object;
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            self.note(resource, "DELETED", object);
        }
    }

    /// Removes the objects whose owners are all absent, as the garbage collector does.
    pub(super) fn collect(&mut self) {
        let is_owner = |object: &Value, reference: &Value| {
            ["apiVersion", "kind"].iter().all(|key| object[key] == reference[key])
                && ["name", "uid"].iter().all(|key| object["metadata"][key] == reference[key])
        };
        let has_owner = |reference: &Value| {
            self.stored.values().any(|stored| is_owner(&stored.object, reference))
        };
        let is_left = |object: &Value| {
            let owners = object["metadata"]["ownerReferences"].as_array();
            owners.is_some_and(|own| !own.is_empty() && !own.iter().any(has_owner))
        };
        let left = self.stored.iter().filter(|(_, stored)| is_left(&stored.object));
        let left: Vec<_> = left.map(|(place, _)| place.clone()).collect();
        for (resource, key) in left {
            self.remove(&resource, &key);
        }
    }

    pub(super) fn compact(&mut self) {
        self.version += 1;
        self.compacted = self.version;
        self.changes.clear();
    }

    pub(super) fn is_expired(&self, position: u64) -> bool {
        position != 0 && position < self.compacted
    }

    fn note(&mut self, resource: &str, kind: &'static str, object: Value) {
        let resource = resource.to_owned();
        self.changes.push(Change { version: self.version, resource, kind, object });
    }

    /// Stores an object, and returns it with its new version.
    fn store(&mut self, resource: &str, key: &str, mut stored: Stored) -> Value {
        let place = (resource.to_owned(), key.to_owned());
        let is_new =
            !self.stored.contains_key(&place) && stored.object["metadata"]["uid"].is_null();
        self.version += 1;
        let metadata = &mut stored.object["metadata"];
        if is_new {
            self.uids += 1;
            metadata["uid"] = json!(format!("00000000-0000-4000-8000-{:012}", self.uids));
            metadata["creationTimestamp"] = json!("2026-11-26T00:00:00Z");
            metadata["generation"] = json!(1);
        }
        metadata["resourceVersion"] = json!(self.version.to_string());
        let object = stored.object.clone();
        self.stored.insert(place, stored);
        self.note(resource, if is_new { "ADDED" } else { "MODIFIED" }, object.clone());
        object
    }

    /// Handles a request that is not a watch. Returns status and body of the response.
    pub(super) fn handle(
        &mut self,
        request: &ApiRequest,
        media: &str,
        body: &[u8],
    ) -> Result<(u16, Value), ApiRefusal> {
        let resource = request.resource.as_str();
        if !BUILT_IN.contains(&resource) && !self.schemas.contains_key(resource) {
            let message = "the server could not find the requested resource";
            return Err(ApiRefusal::of(404, "NotFound", message));
        }
        let (key, place) = (request.key(), (resource.to_owned(), request.key()));
        let sent: Value = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(body)
                .map_err(|error| ApiRefusal::of(400, "BadRequest", &error.to_string()))?
        };
        let absent = || ApiRefusal::not_found(&request.name);
        match request.verb {
            Verb::List => self.list(request),
            Verb::Get => {
                let stored = self.stored.get(&place).ok_or_else(absent)?;
                Ok((200, stored.object.clone()))
            }
            Verb::Create => {
                let key = key_of(&sent);
                if self.stored.contains_key(&(resource.to_owned(), key.clone())) {
                    let message = format!("{resource} {key:?} already exists");
                    return Err(ApiRefusal::of(409, "AlreadyExists", &message));
                }
                let stored = Stored { object: sent, owners: Owners::new() };
                Ok((201, self.store(resource, &key, stored)))
            }
            Verb::Update => {
                let current = self.stored.get(&place).ok_or_else(absent)?;
                check_version(&current.object, &sent["metadata"]["resourceVersion"])?;
                if current.object == sent {
                    return Ok((200, sent));
                }
                let owners = current.owners.clone();
                Ok((200, self.store(resource, &key, Stored { object: sent, owners })))
            }
            Verb::Patch if media == "application/apply-patch+yaml" => self.apply(request, sent),
            Verb::Patch if media == "application/merge-patch+json" => {
                let current = self.stored.get(&place).ok_or_else(absent)?;
                let (mut object, owners) = (current.object.clone(), current.owners.clone());
                check_version(&object, &sent["metadata"]["resourceVersion"])?;
                merge(&mut object, &sent);
                if let Some(schema) = self.schemas.get(resource) {
                    prune_object(&mut object, schema);
                }
                Ok((200, self.store(resource, &key, Stored { object, owners })))
            }
            Verb::Patch => {
                let message = format!("the body of the request was in an unknown format: {media}");
                Err(ApiRefusal::of(415, "UnsupportedMediaType", &message))
            }
            Verb::Delete => {
                let current = &self.stored.get(&place).ok_or_else(absent)?.object;
                for name in ["uid", "resourceVersion"] {
                    let wanted = &sent["preconditions"][name];
                    if !wanted.is_null() && *wanted != current["metadata"][name] {
                        let message =
                            format!("Precondition failed: {name} in precondition: {wanted}");
                        return Err(ApiRefusal::of(409, "Conflict", &message));
                    }
                }
                self.remove(resource, &key);
                Ok((200, json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" })))
            }
            Verb::Watch => Err(ApiRefusal::of(400, "BadRequest", "a watch is streamed")),
        }
    }

    fn apply(&mut self, request: &ApiRequest, mut sent: Value) -> Result<(u16, Value), ApiRefusal> {
        let bad = |message: &str| ApiRefusal::of(400, "BadRequest", message);
        let (resource, key) = (request.resource.as_str(), request.key());
        let manager = request.query("fieldManager");
        if manager.is_empty() {
            return Err(bad("PatchOptions.meta.k8s.io \"\" is invalid: fieldManager is required"));
        }
        if sent["metadata"]["name"] != json!(request.name) {
            return Err(bad("the name of the object does not match the name on the URL"));
        }
        if !sent["apiVersion"].is_string() || !sent["kind"].is_string() {
            return Err(bad("apiVersion and kind must be set"));
        }
        if !sent["metadata"]["managedFields"].is_null() {
            return Err(bad("metadata.managedFields must be nil"));
        }
        let owners = sent["metadata"]["ownerReferences"].as_array().into_iter().flatten();
        let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        for owner in owners {
            let mut keys = ["apiVersion", "kind", "name", "uid"].iter();
            if let Some(key) = keys.find(|key| !is_text(&owner[*key])) {
                let message = format!("metadata.ownerReferences.{key}: Invalid value: not empty");
                return Err(ApiRefusal::of(422, "Invalid", &message));
            }
        }
        let current = self.stored.get(&(resource.to_owned(), key.clone()));
        let has_subresource = request.subresource.is_empty() || self.with_status.contains(resource);
        if !has_subresource {
            let message = "the server could not find the requested resource";
            return Err(ApiRefusal::of(404, "NotFound", message));
        }
        if current.is_none() && !request.subresource.is_empty() {
            return Err(ApiRefusal::not_found(&request.name));
        }
        let is_new = current.is_none();
        let (mut object, mut owners) = match current {
            Some(stored) => (stored.object.clone(), stored.owners.clone()),
            None => (json!({}), Owners::new()),
        };
        check_version(&object, &sent["metadata"]["resourceVersion"])?;
        // With a status subresource, each of the two endpoints writes only its part.
        if request.subresource == "status" {
            let status = sent["status"].take();
            let head = ["apiVersion", "kind", "metadata"].map(|key| (key, sent[key].clone()));
            sent = json!({ "status": status });
            head.into_iter().for_each(|(key, value)| sent[key] = value);
        } else if let Some(fields) = sent.as_object_mut() {
            fields.remove("status");
        }
        if let Some(schema) = self.schemas.get(resource) {
            prune_object(&mut sent, schema);
        }
        let before = object.clone();
        let is_forced = request.query("force") == "true";
        let by = (manager, request.subresource.as_str());
        apply::apply(&mut object, &mut owners, by, &sent, is_forced).map_err(|owned| {
            let named =
                owned.iter().map(|own| format!("conflict with {:?}: .{}", own.manager, own.field));
            let named: Vec<_> = named.collect();
            let message =
                format!("Apply failed with {} conflicts: {}", named.len(), named.join(", "));
            ApiRefusal::of(409, "Conflict", &message)
        })?;
        if let Some(schema) = self.schemas.get(resource) {
            let mut faults = Vec::new();
            schema::faults(&object, schema, "", &mut faults);
            if !faults.is_empty() {
                let message = format!("{key:?} is invalid: {}", faults.join(", "));
                return Err(ApiRefusal::of(422, "Invalid", &message));
            }
        }
        if object == before {
            return Ok((200, object));
        }
        let status = if is_new { 201 } else { 200 };
        Ok((status, self.store(resource, &key, Stored { object, owners })))
    }

    /// Returns a part of a list. A position consists of the list's version and the next key.
    fn list(&self, request: &ApiRequest) -> Result<(u16, Value), ApiRefusal> {
        let (version, from) = match request.query("continue").split_once(' ') {
            Some((version, from)) => (version.parse().unwrap_or(0), from.to_owned()),
            None => (self.version, String::new()),
        };
        if self.is_expired(version) {
            let message = "The provided continue parameter is too old";
            return Err(ApiRefusal::of(410, "Expired", message));
        }
        let limit = request.query("limit").parse().unwrap_or(usize::MAX);
        let matching = self.stored.iter().filter(|((resource, key), stored)| {
            *resource == request.resource && *key >= from && is_selected(request, &stored.object)
        });
        let mut matching: Vec<_> = matching.collect();
        let rest = matching.split_off(limit.min(matching.len()));
        let position = rest.first().map(|((_, key), _)| format!("{version} {key}"));
        let items: Vec<_> = matching.iter().map(|(_, stored)| stored.object.clone()).collect();
        let list = json!({
            "kind": "List", "apiVersion": "v1",
            "metadata": {
                "resourceVersion": version.to_string(),
                "continue": position.unwrap_or_default(),
            },
            "items": items,
        });
        Ok((200, list))
    }

    /// Returns the lines of a watch since a position, the next position, and whether the watch is
    /// over.
    pub(super) fn changes(&self, request: &ApiRequest, position: u64) -> (String, u64, bool) {
        if self.is_expired(position) {
            let status = ApiRefusal::of(410, "Expired", "too old resource version").status();
            let line = json!({ "type": "ERROR", "object": status });
            return (format!("{line}\n"), position, true);
        }
        let new = self.changes.iter().filter(|change| {
            change.version > position
                && change.resource == request.resource
                && is_selected(request, &change.object)
        });
        let lines = new
            .map(|change| format!("{}\n", json!({ "type": change.kind, "object": change.object })));
        let mut lines: String = lines.collect();
        // An API server sends bookmarks now and then: objects with zero values, except for the
        // position.
        if !lines.is_empty() && request.query("allowWatchBookmarks") == "true" {
            let metadata = json!({
                "resourceVersion": self.version.to_string(),
                "creationTimestamp": null,
            });
            let object = json!({
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": metadata,
                "spec": { "containers": null },
                "status": {},
            });
            lines.push_str(&format!("{}\n", json!({ "type": "BOOKMARK", "object": object })));
        }
        (lines, self.version.max(position), false)
    }
}

fn prune_object(object: &mut Value, schema: &Value) {
    for part in ["spec", "status"] {
        if let Some(value) = object.get_mut(part) {
            match schema["properties"].get(part) {
                Some(schema) => schema::prune(value, schema),
                None => *value = json!({}),
            }
        }
    }
}

fn check_version(current: &Value, wanted: &Value) -> Result<(), ApiRefusal> {
    if wanted.is_null() || *wanted == current["metadata"]["resourceVersion"] {
        return Ok(());
    }
    let message = "the object has been modified; please apply your changes to the latest version";
    Err(ApiRefusal::of(409, "Conflict", message))
}

fn key_of(object: &Value) -> String {
    let part = |name: &str| object["metadata"][name].as_str().unwrap_or_default();
    if part("namespace").is_empty() {
        part("name").to_owned()
    } else {
        format!("{}/{}", part("namespace"), part("name"))
    }
}

/// Returns whether an object matches the namespace and the selectors of a request.
fn is_selected(request: &ApiRequest, object: &Value) -> bool {
    let pairs = |selector: &str| -> Vec<(String, String)> {
        let pairs = selector.split(',').filter_map(|pair| pair.split_once('='));
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    let has_label =
        |(key, value): (String, String)| object["metadata"]["labels"][&key] == json!(value);
    // A key without a value selects all objects that have the key.
    let has_key = |key: &&str| !object["metadata"]["labels"][*key].is_null();
    let keys = request.query("labelSelector").split(',');
    let mut keys = keys.filter(|part| !part.is_empty() && !part.contains('='));
    let has_field = |(path, value): (String, String)| {
        let field = path.split('.').try_fold(object, |value, key| value.get(key));
        field == Some(&json!(value))
    };
    (request.namespace.is_empty() || object["metadata"]["namespace"] == json!(request.namespace))
        && pairs(request.query("labelSelector")).into_iter().all(has_label)
        && keys.all(|key| has_key(&key))
        && pairs(request.query("fieldSelector")).into_iter().all(has_field)
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            target.as_object_mut().map(|fields| fields.remove(key));
        } else {
            merge(&mut target[key], value);
        }
    }
}
