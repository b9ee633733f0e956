//! EC2 on this machine, for tests. moto keeps the resources; a proxy in front of moto applies
//! faults and adds what moto lacks. Instances are namespaces or virtual machines.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test at its place"
)]

pub mod calls;
mod catalogue;
pub mod client;
mod cloud;
mod daemon;
mod dhcp;
pub mod faults;
pub mod instance;
mod machine;
mod metadata;
mod moto;
mod proxy;
pub mod query;
mod role;
mod shared;
pub mod throttle;
pub mod volume;
mod vpc;
pub mod xml;

pub use calls::{Call, Outcome};
pub use client::Reply;
pub use cloud::{Cloud, Host, Setup, Subnet};
pub use faults::{Credentials, Faults, Hold, Lists, Market, Outage};
pub use instance::{Instance, State};
pub use machine::Disk;
pub use role::RoleKey;
pub use volume::{ImageVolume, Volume};
