//! What daemon and agent share of the link between them: bootstrap data, TLS, and calls over a
//! connection that the other side dialled.

pub mod alpn;
pub mod bootstrap;
pub mod certificate;
pub mod channel;
pub mod clock;
pub mod connection;
pub mod core_dump;
pub mod frames;
pub mod held;
pub mod http2;
pub mod log_limit;
pub mod private;
pub mod resolver;
pub mod silence;
pub mod stream;
pub mod tls;
pub mod watched;
