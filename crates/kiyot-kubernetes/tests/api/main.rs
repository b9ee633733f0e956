//! The publisher before a played API server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails its test")]

mod faults;
mod leases;
mod rights;
mod world;
