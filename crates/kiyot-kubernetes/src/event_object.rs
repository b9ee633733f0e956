//! Event objects, and their names.

use serde_json::{Value, json};

use crate::time;

/// Component that reports events.
const COMPONENT: &str = "kiyot";
/// Bounds the subject's name in an event's name, in bytes: 253 without the number.
const MAX_NAME_BYTES: usize = 235;

/// An Event object, without its reporter.
#[derive(Debug)]
pub struct EventObject<'e> {
    /// Name, made by [`name`].
    pub name: &'e str,
    /// Namespace.
    pub namespace: &'e str,
    /// Reference to the object that the event is about.
    pub subject: Value,
    /// True for the type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason, a word.
    pub reason: &'e str,
    /// Details.
    pub message: &'e str,
    /// Time of the first occurrence, in nanoseconds since 1970.
    pub first_unix_nanos: i64,
    /// Time of the last occurrence, in nanoseconds since 1970.
    pub last_unix_nanos: i64,
    /// Occurrences.
    pub count: u32,
}

impl EventObject<'_> {
    /// Returns the object that a node reports.
    pub fn of_node(self, node: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": { "name": self.name, "namespace": self.namespace },
            "involvedObject": self.subject,
            "type": if self.is_warning { "Warning" } else { "Normal" },
            "reason": self.reason,
            "message": self.message,
            "source": { "component": COMPONENT, "host": node },
            "reportingComponent": COMPONENT,
            "reportingInstance": node,
            "firstTimestamp": time::seconds(self.first_unix_nanos),
            "lastTimestamp": time::seconds(self.last_unix_nanos),
            "count": self.count,
        })
    }
}

/// Returns the name of an event: its subject's name, shortened, and a number that is unique for the
/// subject.
pub fn name(subject: &str, number: u64) -> String {
    let subject: String = subject.chars().take(MAX_NAME_BYTES).collect();
    format!("{}.{number:x}", subject.trim_end_matches(['-', '.']))
}
