//! The engine of cells: orders, cells and the choice of offerings, without input or output.
//!
//! The engine uses no tasks, files or sockets: the daemon or the simulator carries out its effects.

pub mod engine;
pub mod id;
pub mod placement;
pub mod provider;
pub mod request;
mod store_error;
mod wanted;

pub use store_error::StoreError;
pub use wanted::{OrderKey, Wanted};
