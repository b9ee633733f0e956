//! The client role of SPDY/3.1, as moby/spdystream speaks it in the streaming servers of CRI: exec,
//! attach and port-forward. Unlike WebSocket with `v4.channel.k8s.io`, it can half-close a stream,
//! and forwards several ports on one connection.
//!
//! `Encoder` and `Decoder` are pure; [`connect`] adds a TCP connection with bounded buffers. As in
//! spdystream there is no flow control: data that a caller doesn't take holds up all streams.

mod connection;
mod decode;
mod encode;
mod upgrade;

pub use connection::{Closed, Receiver, Sender, connect};
pub use decode::{Decoder, Frame, FrameError, MAX_CONTROL_BYTES};
pub use encode::{Encoder, MAX_DATA_BYTES, StreamError};
pub use upgrade::{Target, UpgradeError};

/// A control frame of version 3, in its first two bytes.
const CONTROL: u16 = 0x8003;
/// Length of a frame's head in bytes.
const HEAD_BYTES: usize = 8;
/// Flag of the last frame of a half-stream.
const FLAG_FIN: u8 = 1;

/// Types of control frames.
mod kind {
    pub(crate) const SYN_STREAM: u16 = 1;
    pub(crate) const SYN_REPLY: u16 = 2;
    pub(crate) const RST_STREAM: u16 = 3;
    pub(crate) const PING: u16 = 6;
    pub(crate) const GOAWAY: u16 = 7;
    pub(crate) const HEADERS: u16 = 8;
}
