//! The CRI front door between a played caller, a played container runtime and a played decoded
//! backend. No root, no containerd.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "this is a test")]

mod backend;
mod broken_lists;
mod caller;
mod compressed;
mod decoded;
mod door;
mod events;
mod faults;
mod forwarding;
mod limits;
mod lists;
mod newer;
mod played;
mod rules;
mod runtimes;
mod stop;
mod streams;
mod wire;
