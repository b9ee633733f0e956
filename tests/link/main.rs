//! The link: the gateway of the daemon against the home of the agent, in one process and without
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
mod enrolment;
mod hostile;
mod memory;
mod reconnect;
