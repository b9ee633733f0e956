//! The object `Cell`, as `deploy/crds/cells.kiyot.elotl.co.yaml` defines it.

use std::collections::BTreeMap;

use kiyot_proto::{admin, text::cell_phase};
use serde::{Deserialize, Serialize};

use crate::{label, source::ShownCell, time};

/// Group of the kind.
pub const GROUP: &str = "kiyot.elotl.co";
/// Version of the kind.
pub const VERSION: &str = "v1";
/// Kind of the objects.
pub const KIND: &str = "Cell";
/// Bounds the text of a field, in characters.
const MAX_TEXT_CHARS: usize = 1024;
/// Bounds the addresses of a cell.
const MAX_ADDRESSES: usize = 16;
/// The launch type of an on-demand instance. The first public version wrote it so.
const ON_DEMAND: &str = "On-Demand";
/// Launch type of a spot instance.
const SPOT: &str = "Spot";

/// An object of the kind `Cell`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cell {
    /// Group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Name, labels and owner.
    pub metadata: Metadata,
    /// The cell's node.
    #[serde(default)]
    pub spec: Spec,
    /// The state of the cell.
    #[serde(default)]
    pub status: Status,
}

/// The metadata of an object that kiyot sets or reads.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Name. A cell's object is named by the cell's id and its node, so that no other node can take
    /// the name.
    pub name: String,
    /// Labels of the pod and of the node.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Owners. The API server removes the object with its last owner.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owner_references: Vec<OwnerReference>,
    /// Identity of the object, set by the API server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Version of the object, set by the API server.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
}

/// A reference to the owner of an object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    /// Group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Identity, which tells the owner from a later object with its name.
    pub uid: String,
}

impl OwnerReference {
    /// Returns a reference to a Node object.
    pub fn node(name: &str, uid: String) -> Self {
        Self { api_version: "v1".to_owned(), kind: "Node".to_owned(), name: name.to_owned(), uid }
    }
}

/// The node of a cell. It does not change.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Node whose daemon runs the cell.
    #[serde(default)]
    pub node_name: String,
    /// Backend of the daemon.
    #[serde(default)]
    pub backend: String,
    /// Warm pool that the cell was launched for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pool: String,
}

/// The state of a cell.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Phase of the cell.
    pub phase: String,
    /// Provider.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub provider: String,
    /// Name of the pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
    /// Namespace of the pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_namespace: String,
    /// Uid of the pod.
    #[serde(rename = "podUID", skip_serializing_if = "String::is_empty")]
    pub pod_uid: String,
    /// `On-Demand` or `Spot`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub launch_type: String,
    /// Instance type.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub instance_type: String,
    /// Id of the instance, set by the provider.
    #[serde(rename = "instanceID", skip_serializing_if = "String::is_empty")]
    pub instance_id: String,
    /// Zone of the instance.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub zone: String,
    /// First address of the pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip: String,
    /// All addresses of the pod.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<String>,
    /// Price in US dollars per hour.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub price_per_hour: String,
    /// Reason for the choice of the offering.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub offering_reason: String,
    /// Time from launch to enrolment, in seconds.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub boot_seconds: String,
    /// Cost since the launch, in US dollars, as of the last write.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub accrued_cost: String,
    /// Reason of the cell's end, or error of its last launch or termination.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Steps of the cell's start.
    pub timeline: Timeline,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// Times of the steps of a start. A pending step has no time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeline {
    /// The provider has launched the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launched: Option<String>,
    /// The cell's PID 1 has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub booted: Option<String>,
    /// The agent has enrolled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enrolled: Option<String>,
    /// The pod is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// The image of the first container is in the cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_ready: Option<String>,
    /// The first container runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_container: Option<String>,
}

/// A condition, in the form of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type.
    pub r#type: String,
    /// `True` or `False`.
    pub status: String,
    /// Time of the last change of the status.
    pub last_transition_time: String,
    /// Reason, a word.
    pub reason: String,
    /// Details.
    pub message: String,
}

/// Returns the object of a cell, which its Node object owns.
pub fn render(shown: &ShownCell, owner: &OwnerReference) -> Cell {
    let ShownCell { cell, labels, .. } = shown;
    let metadata = Metadata {
        name: format!("{}.{}", cell.id, cell.node),
        labels: label::labels(labels, &cell.node),
        owner_references: vec![owner.clone()],
        ..Metadata::default()
    };
    let spec = Spec {
        node_name: cell.node.clone(),
        backend: cell.backend.clone(),
        pool: bounded(&cell.pool),
    };
    Cell {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: KIND.to_owned(),
        metadata,
        spec,
        status: status(shown),
    }
}

fn status(shown: &ShownCell) -> Status {
    let ShownCell { cell, .. } = shown;
    let steps = cell.timeline.unwrap_or_default();
    let offering = cell.offering.as_ref();
    let ips: Vec<String> = cell.addresses.iter().take(MAX_ADDRESSES).cloned().collect();
    let boot = steps
        .enrolled
        .checked_sub(steps.launched)
        .filter(|nanos| *nanos >= 0 && steps.enrolled > 0 && steps.launched > 0);
    let launch_type = |offering: &admin::Offering| if offering.spot { SPOT } else { ON_DEMAND };
    let message = if cell.reason.is_empty() { &cell.error } else { &cell.reason };
    Status {
        phase: cell_phase(cell.phase()).to_owned(),
        provider: bounded(&cell.provider),
        pod_name: cell.pod_name.clone(),
        pod_namespace: cell.pod_namespace.clone(),
        pod_uid: cell.pod_uid.clone(),
        launch_type: offering.map(launch_type).unwrap_or_default().to_owned(),
        instance_type: offering.map(|own| bounded(&own.instance_type)).unwrap_or_default(),
        instance_id: bounded(&cell.instance),
        zone: offering.map(|own| bounded(&own.zone)).unwrap_or_default(),
        ip: ips.first().cloned().unwrap_or_default(),
        ips,
        price_per_hour: offering.map(|own| dollars(own.price_micros)).unwrap_or_default(),
        offering_reason: offering.map(|_| reason(cell)).unwrap_or_default(),
        boot_seconds: boot.map(seconds).unwrap_or_default(),
        accrued_cost: offering.map(|_| dollars(cell.cost_micros)).unwrap_or_default(),
        message: bounded(message),
        timeline: Timeline {
            launched: time::optional(steps.launched),
            booted: time::optional(steps.booted),
            enrolled: time::optional(steps.enrolled),
            bound: time::optional(steps.bound),
            image_ready: time::optional(steps.image_ready),
            first_container: time::optional(steps.first_container),
        },
        conditions: conditions(cell, &steps),
    }
}

/// Returns the reason for a cell's offering, with the number of failed launches.
pub fn reason(cell: &admin::Cell) -> String {
    let failed = match cell.start_failures {
        0 => String::new(),
        1 => " after a failed launch".to_owned(),
        several => format!(" after {several} failed launches"),
    };
    bounded(&format!("{}{failed}", cell.offering_reason))
}

fn conditions(cell: &admin::Cell, steps: &admin::Timeline) -> Vec<Condition> {
    let created = time::seconds(cell.created_unix_nanos);
    let step = |r#type: &str, at: i64, pending: &str| Condition {
        r#type: r#type.to_owned(),
        status: if at > 0 { "True" } else { "False" }.to_owned(),
        last_transition_time: if at > 0 { time::seconds(at) } else { created.clone() },
        reason: if at > 0 { r#type } else { pending }.to_owned(),
        message: String::new(),
    };
    let mut lost = step("Lost", cell.lost_unix_nanos, "AgentHeard");
    if cell.lost_unix_nanos > 0 {
        "AgentSilent".clone_into(&mut lost.reason);
        lost.message = bounded(&cell.reason);
    }
    vec![
        step("Launched", steps.launched, "NotLaunched"),
        step("Enrolled", steps.enrolled, "NotEnrolled"),
        step("PodBound", steps.bound, "NoPod"),
        lost,
    ]
}

/// Keeps the transition times of conditions whose status has not changed.
pub fn keep_transitions(previous: &Status, new: &mut Status) {
    for condition in &mut new.conditions {
        let is_same = |earlier: &&Condition| {
            earlier.r#type == condition.r#type && earlier.status == condition.status
        };
        if let Some(earlier) = previous.conditions.iter().find(is_same) {
            condition.last_transition_time.clone_from(&earlier.last_transition_time);
        }
    }
}

/// Returns whether two states differ in more than the accrued cost, which always grows.
pub fn differ(one: &Status, other: &Status) -> bool {
    let without = |status: &Status| Status { accrued_cost: String::new(), ..status.clone() };
    without(one) != without(other)
}

/// Returns an amount of US dollars with as many decimals as it needs, at least two.
pub fn dollars(micros: u64) -> String {
    let fraction = format!("{:06}", micros % 1_000_000);
    let significant = fraction.trim_end_matches('0').len().max(2);
    format!("{}.{}", micros / 1_000_000, &fraction[..significant])
}

fn seconds(nanos: i64) -> String {
    let tenths = nanos / 100_000_000;
    format!("{}.{}", tenths / 10, tenths % 10)
}

fn bounded(text: &str) -> String {
    text.chars().take(MAX_TEXT_CHARS).collect()
}

#[cfg(test)]
mod tests;
