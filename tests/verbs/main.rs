//! The verbs of pods in cells against played cells, in one process and without root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test can't set up fails the test, at the place"
)]

mod events;
mod exits;
mod features;
mod ids;
mod kit;
mod liars;
mod lifecycle;
mod orders;
mod played;
mod records;
mod retries;
mod times;
mod trouble;
mod usage;
