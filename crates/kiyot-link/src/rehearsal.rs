//! Rehearsals of warm cells: sandboxes that belong to no pod.

/// Namespace of a rehearsal's sandbox. Kubernetes allows no dot in a namespace.
pub const NAMESPACE: &str = "kiyot.rehearsal";
