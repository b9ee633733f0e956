//! Integration tests against real parts: containerd, runc, CNI plugins, and the daemon itself. They
//! need root and namespaces of their own, which cargo's runner gives them (scripts/runner), and
//! fail without.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test cannot set up fails the test, at the place"
)]

mod cell;
mod daemon;
mod kit;
mod local;
mod runtimes;
