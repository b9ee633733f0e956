//! Where the pod finds name servers: addresses behind a link of their own, in a network namespace
//! that nothing else is in.
//!
//! The pod's network stays the pod's: it may listen on port 53 of all its addresses, and nothing is
//! in the way. The link ends with the agent, as the namespace does, which only these sockets hold.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    thread,
};

use kiyot_link::resolver::{CELL_ADDRESS, PREFIX_LEN, address};
use nix::sched::{CloneFlags, unshare};
use rustix::net::netdevice::name_to_index;

use crate::netlink::{self, NEW, Request, attribute};

/// The link's end in the cell.
pub(in super::super) const DEVICE: &str = "kiyot-dns";
/// Its other end.
const INNER: &str = "dns";
/// DNS.
const PORT: u16 = 53;

/// Of linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/veth.h and linux/if.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const AF_INET: u8 = 2;
const IFF_UP: u32 = 1;

/// The sockets of one name server.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) udp: UdpSocket,
    pub(super) tcp: TcpListener,
}

/// Makes the link, and the sockets of so many name servers. What an agent before this one left of
/// it is taken away.
pub(super) fn open(servers: usize) -> io::Result<Vec<Door>> {
    // A namespace is a thread's: this one's ends with it.
    let thread = thread::spawn(move || in_this_thread(servers));
    thread.join().map_err(|_| io::Error::other("the thread that makes the link failed"))?
}

fn in_this_thread(servers: usize) -> io::Result<Vec<Door>> {
    let outside = netlink::socket()?;
    let cell = File::open("/proc/thread-self/ns/net")?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    let inside = netlink::socket()?;

    let left = Request::new(RTM_DELLINK, 0, &link(0, false))
        .with(IFLA_IFNAME, &name(DEVICE))
        .send(&outside);
    match left {
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::NODEV.raw_os_error()) => {
            return Err(error);
        }
        Err(_) | Ok(()) => {}
    }
    let peer = [
        link(0, false),
        attribute(IFLA_IFNAME, &name(DEVICE)),
        attribute(IFLA_NET_NS_FD, &cell.as_raw_fd().to_ne_bytes()),
    ]
    .concat();
    let veth = [
        attribute(IFLA_INFO_KIND, b"veth\0"),
        attribute(IFLA_INFO_DATA, &attribute(VETH_INFO_PEER, &peer)),
    ]
    .concat();
    Request::new(RTM_NEWLINK, NEW, &link(0, false))
        .with(IFLA_IFNAME, &name(INNER))
        .with(IFLA_LINKINFO, &veth)
        .send(&inside)?;
    for (socket, device) in [(&outside, DEVICE), (&inside, INNER)] {
        Request::new(RTM_NEWLINK, 0, &link(name_to_index(socket, device)?, true)).send(socket)?;
    }
    give(&outside, DEVICE, CELL_ADDRESS)?;

    let mut doors = Vec::with_capacity(servers);
    for address in (0..servers).map_while(address) {
        give(&inside, INNER, address)?;
        let (udp, tcp) = (UdpSocket::bind((address, PORT))?, TcpListener::bind((address, PORT))?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        doors.push(Door { udp, tcp });
    }
    Ok(doors)
}

/// An `ifinfomsg`: family and type, index, flags, and which of them change.
fn link(index: u32, up: bool) -> Vec<u8> {
    let flags = if up { IFF_UP } else { 0 };
    [&[0; 4][..], &index.to_ne_bytes(), &flags.to_ne_bytes(), &flags.to_ne_bytes()].concat()
}

fn name(device: &str) -> Vec<u8> {
    [device.as_bytes(), b"\0"].concat()
}

/// Gives a device an address.
fn give(socket: impl AsFd, device: &str, address: Ipv4Addr) -> io::Result<()> {
    let index = name_to_index(&socket, device)?;
    // An `ifaddrmsg`: family, length of the prefix, flags, scope, index of the device.
    let body = [&[AF_INET, PREFIX_LEN, 0, 0][..], &index.to_ne_bytes()].concat();
    let octets = address.octets();
    Request::new(RTM_NEWADDR, NEW, &body)
        .with(IFA_LOCAL, &octets)
        .with(IFA_ADDRESS, &octets)
        .send(&socket)
}
