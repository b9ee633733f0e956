//! EC2 by AWS's SDK.

mod client;
mod error;
mod launch;
mod prices;
mod response;

pub use client::{Client, ClientConfig};
