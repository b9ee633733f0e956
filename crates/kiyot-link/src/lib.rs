//! The link between the daemon and the agent of a cell, as far as both share it: bootstrap data,
//! TLS, framing, and calls over connections that the agent dialled.

pub mod alpn;
pub mod architecture;
pub mod bind_limits;
pub mod bootstrap;
pub mod certificate;
pub mod channel;
pub mod clock;
pub mod connection;
pub mod core_dump;
pub mod cri_settings;
pub mod frames;
pub mod http2;
pub mod keepalive;
pub mod link_connection;
pub mod log_limit;
pub mod mac_address;
pub mod private_file;
pub mod rehearsal;
pub mod resolver;
pub mod stream;
pub mod tls;
pub mod vm_file;
pub mod watch;
