//! Kiyot: nodeless Kubernetes pods. A CRI endpoint that routes each pod sandbox to the node's
//! container runtime or to a cell of its own.
//!
//! A request walks through the folders in one direction: `proxy` (the front door) -> `backends`
//! (what answers) -> `backends::milpa` (pods in cells) -> its parts. See ARCHITECTURE.md.

pub mod annotations;
pub mod app;
pub mod backends;
pub mod cli;
pub mod config;
pub mod manifest;
pub mod problems;
pub mod proxy;
