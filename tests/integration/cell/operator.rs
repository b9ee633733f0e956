//! Operators of cells, by the admin API and by Kubernetes.

pub(crate) mod admin;
mod admin_lists;
pub(crate) mod admin_streams;
pub(crate) mod admin_versions;
pub(crate) mod events;
mod kubernetes;
