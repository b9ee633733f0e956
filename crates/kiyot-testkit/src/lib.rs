//! What tests, benches and the demo share: a private containerd, images made on the spot, a CRI
//! client that calls as a kubelet does, and the real daemon as a process. Never the root package:
//! nothing of the daemon's own code helps to test it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test can't set up fails the test, at the place"
)]

pub mod cell;
pub mod command;
pub mod image;
pub mod kiyot;
pub mod kubelet;
pub mod leftovers;
pub mod log;
pub mod node;
pub mod processes;
pub mod registry;
pub mod rng;
pub mod spdy;
pub mod sweep;
pub mod wait;
pub mod watchdog;
pub mod websocket;

pub use cell::PlayedCell;
pub use command::output;
pub use kiyot::{Kiyot, KiyotOptions};
pub use kiyot_proto::cri;
pub use kubelet::{
    Container, Kubelet, LogLine, Pod, RunningContainer, RunningPod, Volume, volumes::Source,
};
pub use leftovers::Leftovers;
pub use node::Node;
pub use processes::{kill_all, processes};
pub use registry::{Access, Pace, Registry};
pub use rng::{SeededRng, seed};
pub use wait::{LIMIT, allowed, wait_until};
