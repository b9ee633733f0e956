//! Kiyot: nodeless Kubernetes pods. A CRI endpoint that routes each pod sandbox to the node's
//! container runtime or to a cell of its own.
//!
//! Imports run in one direction: `app` wires `proxy` (the CRI socket), `backends` (container
//! runtimes) and `backends::milpa` (pods in cells). See ARCHITECTURE.md.

pub mod admin;
pub mod annotations;
pub mod app;
pub mod backends;
mod blocking;
pub mod cli;
pub mod explain;
mod kubernetes;
pub mod metrics;
pub mod proxy;
pub mod recent_log;
mod unix_channel;
mod unix_listener;
pub mod workload;
