//! Tests of the link: the daemon's gateway and the agent's side, in a single process and without
//! root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test cannot set up fails the test, at the place"
)]

mod kit;

mod admission;
mod bulk;
mod calls;
mod clocks;
mod downloads;
mod enrolment;
mod hostile;
mod memory;
mod reconnect;
mod slow;
mod strangers;
