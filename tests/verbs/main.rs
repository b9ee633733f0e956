//! The CRI service of pods in cells with fake cells, in a single process and without root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test with its line"
)]

mod clocks;
mod events;
mod exits;
mod failures;
mod fake_provider;
mod features;
mod figures;
mod hardware;
mod hostile;
mod ids;
mod kit;
mod lifecycle;
mod limits;
mod placement;
mod random_calls;
mod records;
mod retries;
mod usage;
