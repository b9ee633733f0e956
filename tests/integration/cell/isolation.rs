//! What a pod in a cell has of the node, and what it can't reach.

mod contexts;
mod hostile_processes;
mod node_settings;
mod own_namespaces;
mod owners;
mod parity;
pub(crate) mod processes;
mod profiles;
mod refusals;
pub(crate) mod secrets;
pub(crate) mod strangers;
