//! Tests of the netns provider with real namespaces, cgroups and CNI plugins, and a stub in place
//! of `kiyot-cell`. They need root, `ip`, `iptables`, and CNI plugins in /opt/cni/bin or
//! /usr/lib/cni.
#![allow(clippy::unwrap_used, reason = "a failure in a test's helper fails the test")]

mod bench;
mod cells;
mod conformance;
mod link_mtu;
mod network;
mod processes;
mod qemu;
mod sim_provider;
mod store;
mod streaming_port;
mod trees;
