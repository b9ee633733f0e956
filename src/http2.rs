//! HTTP/2 (RFC 9113), towards the two peers that most calls come from and go to: frames are read
//! where they lie and written where they leave from, with no queue of frames between. The peers are
//! trusted to want to be understood, not to be without errors: nothing that one sends takes memory
//! without a bound, nor ends more than its own connection.
//!
//! `core` is what a connection knows, without its socket; it is a client's or a server's by its
//! role. `client` and `server` drive one with a socket.

mod body;
mod client;
mod core;
mod error;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod hpack;
mod line;
mod pong;
mod reason;
mod server;
mod socket;
mod stream;
mod streams;

pub use body::{Receiving, Sending};
pub use client::Answering;
pub(crate) use client::{Client, Connection};
pub use error::{Error, Violation};
pub use reason::Reason;
pub(crate) use server::{Responding, Serving};

/// What one stream may have under way to us before its receiver took it. Bytes. Large enough for
/// most answers, so that window updates are rare.
const STREAM_WINDOW: u32 = 1 << 20;

/// The same of all streams of a connection: more than a thousand streams that nobody reads, which
/// then hold up no other.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// How many streams that we reset a server's connection remembers: callers may cancel all their
/// calls at once, and what they had sent before is under way.
const RESET_STREAMS: usize = 16_384;

/// Metadata of one request or answer at most, in bytes as HTTP/2 counts them. grpc-go allows 16
/// MiB; status details are what is long there.
const MAX_HEADER_LIST: u32 = 1 << 20;

#[cfg(test)]
mod tests;
