//! Tests of the ec2 provider with AWS's SDK, over the test cloud.
#![allow(clippy::unwrap_used, reason = "a failure in a test's helper fails the test")]

mod cloud_routes;
mod faults;
mod launches;
mod lists;
mod live_check;
mod over_cloud;
mod permissions;
mod prices;
mod tags;
mod world;
