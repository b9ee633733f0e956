//! Rehearsals of warm cells, whose sandboxes are no pod's.

/// Namespace of the sandbox of a rehearsal. No namespace of Kubernetes has a dot.
pub const NAMESPACE: &str = "kiyot.rehearsal";
