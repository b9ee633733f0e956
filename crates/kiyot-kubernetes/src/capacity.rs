//! The capacity that a node declares, and the patch that puts it into the Node object.
//!
//! In each write of the node's status, the policy of `deploy/capacity.yaml` sets the figures of the
//! annotation. So the response to a patch of the annotation alone has the figures, or shows that
//! the policy is not applied. The kubelet keeps extended resources that it does not know: the patch
//! also sets them, to lower or withdraw them.

use std::{cmp, collections::BTreeMap};

use kiyot_values::{names::is_bytes, quantity::Quantity};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::requests::Footprint;

/// Label of nodes that declare capacity, and annotation with the figures.
pub const KEY: &str = "kiyot.elotl.co/capacity";
/// The label's value.
const DECLARED: &str = "declared";
/// Largest number in the annotation.
const MAX_NUMBER: u64 = 999_999;

/// Figures by the names of their resources: memory and ephemeral storage in MiB, others in whole
/// numbers.
pub type Figures = BTreeMap<String, u64>;

/// The parts of a Node object that its capacity needs.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Metadata.
    pub metadata: NodeMetadata,
    /// Taints.
    pub spec: NodeSpec,
    /// Figures.
    pub status: NodeStatus,
}

/// The metadata of a Node object.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeMetadata {
    /// Identity.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// The taints of a Node object.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// Taints.
    pub taints: Vec<Taint>,
}

/// A taint of a Node object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value.
    pub value: String,
    /// Effect on pods.
    pub effect: String,
}

impl Taint {
    /// Returns whether the taint is `cri=kiyot:NoSchedule`, of nodes that declare capacity.
    pub fn is_of_cells(&self) -> bool {
        (&*self.key, &*self.value, &*self.effect) == ("cri", "kiyot", "NoSchedule")
    }
}

/// The figures of a Node object: quantities by the names of resources.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// The whole capacity of the node.
    pub capacity: BTreeMap<String, String>,
    /// The part for pods, by which the scheduler and the kubelet admit pods.
    pub allocatable: BTreeMap<String, String>,
}

impl Node {
    /// Returns whether an administrator lets the node declare its capacity.
    pub fn is_declared(&self) -> bool {
        self.metadata.labels.get(KEY).is_some_and(|value| value == DECLARED)
    }

    /// Returns the figures that exceed the node's, as texts.
    pub fn lacks(&self, figures: &Figures) -> Vec<String> {
        let has = |name: &str| self.status.allocatable.get(name)?.parse::<Quantity>().ok();
        let lacked = figures.iter().filter(|(name, amount)| {
            let wanted: Quantity = quantity(name, **amount).parse().unwrap_or_default();
            has(name).is_none_or(|has: Quantity| has < wanted)
        });
        lacked.map(|(name, amount)| format!("{name}={}", quantity(name, *amount))).collect()
    }
}

/// Returns the figures to declare: each configured figure, or the amount of the node's pods if that
/// is more.
pub fn figures(configured: &Figures, counted: &Footprint) -> Figures {
    let figure = |(name, amount): (&String, &u64)| {
        (name.clone(), cmp::max(*amount, counted.amount(name).div_ceil(unit(name))))
    };
    configured.iter().map(figure).collect()
}

/// Returns the size of a figure's unit in the unit of requests: thousandths of a CPU, bytes, or
/// whole numbers.
pub fn unit(name: &str) -> u64 {
    match name {
        "cpu" => 1000,
        name if is_bytes(name) => 1 << 20,
        _ => 1,
    }
}

/// Returns a figure as a quantity of at most six digits, rounded up.
fn quantity(name: &str, amount: u64) -> String {
    if !is_bytes(name) {
        return amount.min(MAX_NUMBER).to_string();
    }
    let in_unit = |(shift, unit)| (amount.div_ceil(1_u64 << shift), unit);
    let mut units = [(0, "Mi"), (10, "Gi"), (20, "Ti")].map(in_unit).into_iter();
    let (number, unit) =
        units.find(|(number, _)| *number <= MAX_NUMBER).unwrap_or((MAX_NUMBER, "Ti"));
    format!("{number}{unit}")
}

/// Returns figures in the form of the annotation.
pub fn text(figures: &Figures) -> String {
    let figures =
        figures.iter().map(|(name, amount)| format!("{name}={}", quantity(name, *amount)));
    figures.collect::<Vec<_>>().join(",")
}

/// Returns the patch of a node's status that declares figures; `None` if the node already has them.
pub fn patch(figures: &Figures, node: &Node) -> Option<Value> {
    let (text, earlier) = (text(figures), node.metadata.annotations.get(KEY));
    let is_extended = |name: &&str| name.contains('/');
    let earlier_names = earlier.map(String::as_str).unwrap_or_default().split(',');
    let earlier_names = earlier_names.filter_map(|figure| Some(figure.split_once('=')?.0));
    let withdrawn = earlier_names.filter(|name| !figures.contains_key(*name)).filter(is_extended);
    let wanted = figures.iter().filter(|(name, _)| is_extended(&name.as_str()));
    let wanted = wanted.map(|(name, amount)| (name.as_str(), Some(quantity(name, *amount))));
    let wanted: Vec<_> = withdrawn.map(|name| (name, None)).chain(wanted).collect();
    // The API server writes 1000 as 1k.
    let parsed = |text: &String| text.parse::<Quantity>().ok();
    let changes = |has: &BTreeMap<String, String>| -> Map<String, Value> {
        let changes = wanted.iter().filter(|(name, wanted)| match (has.get(*name), wanted) {
            (Some(has), Some(wanted)) => parsed(has) != parsed(wanted),
            (has, wanted) => has.is_some() || wanted.is_some(),
        });
        changes.map(|(name, wanted)| ((*name).to_owned(), json!(wanted))).collect()
    };
    let (capacity, allocatable) =
        (changes(&node.status.capacity), changes(&node.status.allocatable));
    if earlier == Some(&text)
        && capacity.is_empty()
        && allocatable.is_empty()
        && node.lacks(figures).is_empty()
    {
        return None;
    }
    Some(json!({
        "metadata": { "annotations": { KEY: text } },
        "status": { "capacity": capacity, "allocatable": allocatable },
    }))
}

#[cfg(test)]
mod tests;
