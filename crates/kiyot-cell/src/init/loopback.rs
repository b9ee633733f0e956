//! Loopback interface, which is down in a new network namespace.

use std::io;

use crate::netlink::{self, Request};

/// `RTM_NEWLINK` of linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
/// `IFF_UP` of linux/if.h.
const IFF_UP: u32 = 1;
/// The loopback is the first interface of each namespace.
const LOOPBACK_INDEX: i32 = 1;

/// Brings up `lo` in the caller's network namespace.
pub fn up() -> io::Result<()> {
    // An `ifinfomsg`: family and type, index, flags, mask of changed flags.
    let mut body = vec![0; 4];
    body.extend(LOOPBACK_INDEX.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    Request::new(RTM_NEWLINK, 0, &body).send(netlink::socket()?)
}
