//! Tests of the test cloud.

#![allow(clippy::unwrap_used, reason = "a failed setup fails the test at its place")]

mod api;
mod faults;
mod instances;
mod network;
