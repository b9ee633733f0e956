//! Parser of pods in YAML, with the fields that examples and tests of static pods use.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Container, Pod, volumes::Source};

/// Supported fields of a container.
const OF_CONTAINER: [&str; 6] = ["name", "image", "command", "env", "volumeMounts", "resources"];

/// Returns the pods of a text of documents. The text has their ConfigMaps in other documents.
///
/// # Panics
/// If the text is not YAML, or a container or volume has an unsupported field.
pub fn pods_of(text: &str) -> Vec<Pod> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).expect("the manifest is YAML");
    let of_kind = |kind: &'static str| documents.iter().filter(move |it| it["kind"] == kind);
    let maps: BTreeMap<String, BTreeMap<String, Vec<u8>>> = of_kind("ConfigMap")
        .map(|map| {
            let files = texts(&map["data"]).into_iter();
            let files = files.map(|(key, value)| (key, value.into_bytes()));
            (string(&map["metadata"]["name"]), files.collect())
        })
        .collect();
    of_kind("Pod").map(|document| pod_of(document, &maps)).collect()
}

fn pod_of(document: &Value, maps: &BTreeMap<String, BTreeMap<String, Vec<u8>>>) -> Pod {
    let (metadata, spec) = (&document["metadata"], &document["spec"]);
    let mut pod = Pod::new(&string(&metadata["name"]));
    if let Some(namespace) = metadata["namespace"].as_str() {
        namespace.clone_into(&mut pod.namespace);
    }
    (pod.labels, pod.annotations) = (texts(&metadata["labels"]), texts(&metadata["annotations"]));
    pod.grace = spec["terminationGracePeriodSeconds"].as_i64().unwrap_or(pod.grace);
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        let source = match (&volume["configMap"]["name"], &volume["emptyDir"]) {
            (Value::String(name), _) => Source::ConfigMap(maps[name].clone()),
            (_, Value::Object(_)) => Source::EmptyDir { memory: false },
            _ => panic!("a test's kubelet does not make the volume {volume}"),
        };
        pod = pod.volume(&string(&volume["name"]), source);
    }
    for container in spec["containers"].as_array().into_iter().flatten() {
        pod = pod.container(container_of(container));
    }
    pod
}

fn container_of(value: &Value) -> Container {
    let unread = value
        .as_object()
        .into_iter()
        .flatten()
        .find(|(key, _)| !OF_CONTAINER.contains(&key.as_str()));
    assert!(unread.is_none(), "a test's kubelet does not read {unread:?} of a container");
    let mut container = Container::of_image(&string(&value["name"]), &string(&value["image"]));
    container.command = value["command"].as_array().into_iter().flatten().map(string).collect();
    // The examples use MiB.
    let memory = value["resources"]["limits"]["memory"].as_str();
    let mebibytes = memory.map(|text| text.strip_suffix("Mi").and_then(|text| text.parse().ok()));
    if let Some(mebibytes) = mebibytes {
        let mebibytes: i64 = mebibytes.expect("the memory limit is in MiB");
        container.resources.memory_limit_in_bytes = mebibytes << 20;
    }
    for variable in value["env"].as_array().into_iter().flatten() {
        container = container.env(&string(&variable["name"]), &string(&variable["value"]));
    }
    for mount in value["volumeMounts"].as_array().into_iter().flatten() {
        container = container.mount(&string(&mount["name"]), &string(&mount["mountPath"]));
    }
    container
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    let fields = value.as_object().into_iter().flatten();
    fields.map(|(key, value)| (key.clone(), string(value))).collect()
}
