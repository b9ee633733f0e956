//! The crate's tasks with a played API server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails its test")]

mod admission;
mod budget_rules;
mod budgets;
mod capacity;
mod capacity_check;
mod declarer;
mod events;
mod faults;
mod owners;
mod pods;
mod policy;
mod rights;
mod sweep;
mod world;
