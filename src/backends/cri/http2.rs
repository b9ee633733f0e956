//! HTTP/2 as its client (RFC 9113), for the one peer that most calls go to: frames are read where they lie and written where they leave from, with no queue of
//! frames between. The peer is trusted to want to answer, not to be without errors: nothing that it sends takes memory without a bound, nor ends more than its
//! own connection.

mod call;
mod connection;
mod core;
mod error;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod hpack;
mod stream;
mod streams;

pub(super) use call::Client;
pub use call::{Answering, Receiving, Sending};
pub(super) use connection::Connection;
pub use error::Error;

#[cfg(test)]
mod tests;
