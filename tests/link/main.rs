//! Tests of the link: the daemon's gateway and the agent's side run in one process, without root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test in place"
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
