//! Parts of the node that a pod in a cell can reach, and parts that it can't reach.

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
