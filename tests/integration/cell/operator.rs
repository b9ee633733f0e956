//! Operators of cells, through the admin API and Kubernetes.

pub(crate) mod admin;
mod admin_lists;
pub(crate) mod admin_streams;
pub(crate) mod admin_versions;
pub(crate) mod events;
mod kubernetes;
