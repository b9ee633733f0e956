//! References of a pod to objects of the API server, for which a kubelet refuses a static pod
//! (`HasAPIObjectReference` of pkg/api/pod).

use serde_json::Value;

/// Fields of a `spec` that name objects.
const OF_SPEC: [&str; 4] =
    ["imagePullSecrets", "resourceClaims", "serviceAccount", "serviceAccountName"];
/// Parts of a `spec` that have references at any depth.
const PARTS: [&str; 3] = ["containers", "initContainers", "volumes"];
/// Fields of these parts that name objects.
const OF_PARTS: [&str; 14] = [
    "azureFile",
    "clusterTrustBundle",
    "configMap",
    "configMapKeyRef",
    "configMapRef",
    "csi",
    "ephemeral",
    "glusterfs",
    "persistentVolumeClaim",
    "podCertificate",
    "secret",
    "secretKeyRef",
    "secretRef",
    "serviceAccountToken",
];

/// Returns the path of the first reference in a `spec`.
pub(super) fn find(spec: &Value) -> Option<String> {
    let of_spec = OF_SPEC.into_iter().find(|key| spec.get(key).is_some_and(is_set));
    of_spec.map(str::to_owned).or_else(|| {
        PARTS
            .into_iter()
            .find_map(|part| spec.get(part).and_then(beneath).map(|path| format!("{part}{path}")))
    })
}

/// Returns the path of the first reference beneath a value.
fn beneath(value: &Value) -> Option<String> {
    match value {
        Value::Object(fields) => fields.iter().find_map(|(key, value)| {
            if OF_PARTS.contains(&key.as_str()) && is_set(value) {
                return Some(format!(".{key}"));
            }
            beneath(value).map(|path| format!(".{key}{path}"))
        }),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(index, item)| beneath(item).map(|path| format!("[{index}]{path}"))),
        _ => None,
    }
}

/// Returns whether Kubernetes treats a value as set, not as an absent field.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => true,
    }
}
