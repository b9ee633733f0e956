//! Code that tests, benches and the demo share: a private containerd, locally built images, a CRI
//! client that calls as a kubelet does, and the daemon as a process. The kit does not depend on the
//! root package, so that the daemon is never tested with its own code.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test at its place"
)]

pub mod command;
pub mod fake_cell;
pub mod image;
pub mod kiyot;
pub mod kubelet;
pub mod kubernetes_api;
pub mod leftovers;
pub mod log;
pub mod node;
pub mod processes;
pub mod registry;
pub mod relay;
pub mod rng;
pub mod spdy;
pub mod sweep;
pub mod terminal;
pub mod wait;
pub mod watchdog;
pub mod websocket;

pub use command::output;
pub use fake_cell::FakeCell;
pub use kiyot::{Kiyot, KiyotOptions, Provider, cell_image};
pub use kiyot_proto::cri;
pub use kubelet::{
    Container, Kubelet, LogLine, Pod, RunningContainer, RunningPod, Volume, volumes::Source,
};
pub use kubernetes_api::{ApiFault, ApiRequest, ApiServer, Recorded, ServiceAccount, Verb, table};
pub use leftovers::Leftovers;
pub use node::Node;
pub use processes::{command_line, kill_all, peak_resident_kib, processes, resident_kib};
pub use registry::{Access, Pace, Registry};
pub use relay::Relay;
pub use rng::{SeededRng, seed};
pub use terminal::Terminal;
pub use wait::{LIMIT, allowed, poll_until, wait_for, wait_until};
