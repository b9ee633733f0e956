//! The agent and the init of a cell.

pub mod home;
