//! Logs, commands, ports and names of pods in cells.

mod execs;
mod forwards;
mod log_files;
mod log_gaps;
mod logs;
pub(crate) mod network;
pub(crate) mod resolvers;
mod streams;
pub(crate) mod wire;
