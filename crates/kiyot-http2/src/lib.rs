//! HTTP/2 (RFC 9113) for the CRI socket and for container runtimes, with the names of the crate
//! `h2`.
//!
//! Frames are decoded in the read buffer and encoded into the write buffer, without a queue of
//! frames between. A peer can use only bounded memory, and end only its own connection.
//!
//! `core` is the state of a connection without its socket: a client's or a server's by its role.
//! [`client`] and [`server`] drive a core with a socket.

mod body;
pub mod client;
mod core;
mod error;
mod frame;
#[cfg(debug_assertions)]
#[path = "../../../fuzz/inside/http2/connections.rs"]
pub mod fuzzing;
mod hpack;
mod io;
mod ping;
mod reason;
pub mod server;
mod socket;
mod stream;
mod streams;

pub use body::{RecvStream, SendStream};
pub use error::{Error, Violation};
pub use reason::Reason;

/// Flow-control window of a stream. Large enough for most responses, so that window updates are
/// rare.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Flow-control window of a connection, so large that more than a thousand streams with full
/// buffers don't block the others.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// Most reset streams that a server remembers to ignore their late frames. A client may cancel all
/// its calls at once.
const MAX_RESET_STREAMS: usize = 16_384;

/// Most bytes of the metadata of a request or response, as HTTP/2 counts them. grpc-go allows 16
/// MiB; only status details are long.
const MAX_HEADER_LIST_BYTES: u32 = 1 << 20;

#[cfg(test)]
mod tests;
