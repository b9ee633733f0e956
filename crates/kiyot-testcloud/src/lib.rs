//! EC2 on this machine, for tests: moto keeps the resources, a proxy before it applies faults and
//! adds what moto lacks.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test at its place"
)]

pub mod calls;
mod catalogue;
pub mod client;
mod cloud;
pub mod faults;
pub mod instance;
mod moto;
mod proxy;
pub mod query;
mod shared;
pub mod throttle;
pub mod xml;

pub use calls::{Call, Outcome};
pub use client::Reply;
pub use cloud::{Cloud, Setup, Subnet};
pub use faults::{Credentials, Faults, Market, Outage};
pub use instance::{Instance, State};
