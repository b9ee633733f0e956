//! Code of the link that the daemon and a cell's agent share: bootstrap data, TLS, framing, and
//! calls over connections that the agent dialled.

pub mod alpn;
pub mod architecture;
pub mod bind_limits;
pub mod bootstrap;
pub mod certificate;
#[cfg(feature = "transport")]
pub mod channel;
#[cfg(feature = "transport")]
pub mod clock;
#[cfg(feature = "transport")]
pub mod connection;
pub mod core_dump;
pub mod cri_settings;
#[cfg(feature = "transport")]
pub mod frames;
#[cfg(feature = "transport")]
pub mod http2;
#[cfg(feature = "transport")]
pub mod keepalive;
#[cfg(feature = "transport")]
pub mod link_connection;
pub mod log_limit;
pub mod mac_address;
pub mod private_file;
pub mod rehearsal;
pub mod resolver;
#[cfg(feature = "transport")]
pub mod stream;
#[cfg(feature = "transport")]
pub mod tls;
pub mod vm_file;
#[cfg(feature = "transport")]
pub mod watch;
