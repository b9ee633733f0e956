//! Loopback interface, which is down in a new network namespace.

use std::io;

use kiyot_linux::netlink::{RTM_NEWLINK, Request, link_message, route_socket};

/// The loopback is the first interface of each namespace.
const LOOPBACK_INDEX: u32 = 1;

/// Brings up `lo` in the caller's network namespace.
pub fn up() -> io::Result<()> {
    Request::new(RTM_NEWLINK, 0, &link_message(LOOPBACK_INDEX, true)).execute(route_socket()?)
}
