//! The provider of cells that are namespaces of this node, with real namespaces, cgroups and CNI
//! plugins, and a stand-in for the cells' program. They need root, `ip`, `iptables`, and CNI
//! plugins in /opt/cni/bin or /usr/lib/cni.
#![allow(clippy::unwrap_used, reason = "what fails in a test's helper fails the test")]

mod bench;
mod cells;
mod network;
mod processes;
mod store;
mod trees;
