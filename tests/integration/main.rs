//! Integration tests of the daemon with real containerd, runc and CNI plugins. They need root and
//! their own namespaces, which cargo's runner provides (scripts/runner).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails its test")]

mod cell;
mod daemon;
mod explain;
mod kit;
mod local;
mod metrics;
mod runtimes;
#[cfg(feature = "otel")]
mod traces;
