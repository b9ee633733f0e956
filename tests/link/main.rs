//! The link: the gateway of the daemon against the home of the agent, in one process and without root.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails as the test does")]

mod kit;

mod admission;
mod bulk;
mod calls;
mod enrolment;
mod hostile;
mod reconnect;
