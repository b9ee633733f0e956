//! Brings up the loopback interface: a new network namespace has it down.

use std::io;

use crate::netlink::{self, Request};

/// `RTM_NEWLINK` of linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
/// `IFF_UP` of linux/if.h.
const IFF_UP: u32 = 1;
/// The loopback is each namespace's first interface.
const LOOPBACK_INDEX: i32 = 1;

/// Brings up `lo` of the caller's network namespace.
pub fn up() -> io::Result<()> {
    // An `ifinfomsg`: family and type, index, flags, and which of them change.
    let mut body = vec![0; 4];
    body.extend(LOOPBACK_INDEX.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    Request::new(RTM_NEWLINK, 0, &body).send(netlink::socket()?)
}
