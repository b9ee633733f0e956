//! The engine of cells: orders, cells and the choice of offerings, without input or output.
//!
//! Tasks, files and sockets are not named here: the daemon carries out its effects, and so does the
//! simulator.

pub mod engine;
pub mod id;
pub mod placement;
pub mod provider;
pub mod request;
mod store_error;
mod wanted;

pub use store_error::StoreError;
pub use wanted::{OrderKey, Wanted};
