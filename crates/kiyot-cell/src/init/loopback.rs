//! Loopback interface, which is down in a new network namespace.

use std::io;

use kiyot_linux::{link, netlink::route_socket};

/// The loopback is the first interface of each namespace.
const LOOPBACK_INDEX: u32 = 1;

/// Brings up `lo` in the caller's network namespace.
pub fn up() -> io::Result<()> {
    link::set_up(route_socket()?, LOOPBACK_INDEX)
}
