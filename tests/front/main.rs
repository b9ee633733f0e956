//! The CRI server between a client, a fake container runtime and a fake decoded backend. Needs
//! neither root nor containerd.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "this is a test")]

mod broken_lists;
mod caller;
mod compressed;
mod decoded;
mod events;
mod fake_cells;
mod fake_runtime;
mod faults;
mod forwarding;
mod limits;
mod lists;
mod metrics;
mod newer;
mod rules;
mod runtimes;
mod server;
mod stop;
mod streams;
mod wire;
