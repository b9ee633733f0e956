//! Values as texts and numbers, such as quantities, prices and CIDRs, and the problems that inputs
//! have. Pure functions without clock, file and socket.

pub mod backoff;
pub mod budget_key;
pub mod cidr;
pub mod csv_rows;
pub mod decimal;
pub mod error_chain;
pub mod glob;
pub mod names;
pub mod price;
pub mod problems;
pub mod quantity;
pub mod spending;
pub mod token_bucket;
