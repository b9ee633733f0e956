//! Sockets of the name servers in the cell, in a separate network namespace at the end of a veth
//! pair.
//!
//! So the pod's own network stays untouched: the pod may listen on port 53 of all its addresses.
//! Only the sockets refer to the namespace, so the namespace and the link end with the agent.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    thread,
};

use kiyot_link::resolver::{CELL_ADDRESS, PREFIX_LEN, address};
use kiyot_linux::{
    link,
    netlink::{self, NLM_F_NEW, RTM_NEWLINK, Request, attribute, link_message},
};
use nix::sched::{CloneFlags, unshare};
use rustix::net::netdevice::name_to_index;

/// Name of the link in the cell's network namespace.
pub(in super::super) const DEVICE: &str = "kiyot-dns";
/// Name of its peer.
const INNER: &str = "dns";
/// DNS port.
const PORT: u16 = 53;

/// Constants of linux/rtnetlink.h, linux/if_link.h and linux/veth.h.
const RTM_DELLINK: u16 = 17;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;

/// Sockets of a name server.
#[derive(Debug)]
pub(super) struct DnsListener {
    pub(super) udp: UdpSocket,
    pub(super) tcp: TcpListener,
}

/// Creates the link and the sockets of `servers` name servers. Removes the link of an earlier
/// agent.
pub(super) fn open(servers: usize) -> io::Result<Vec<DnsListener>> {
    // unshare(2) affects this thread only, which ends with the call.
    let thread = thread::spawn(move || open_in_new_namespace(servers));
    thread.join().map_err(|_| io::Error::other("thread that creates the link panicked"))?
}

fn open_in_new_namespace(servers: usize) -> io::Result<Vec<DnsListener>> {
    let cell_socket = netlink::route_socket()?;
    let cell = File::open("/proc/thread-self/ns/net")?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    let inner_socket = netlink::route_socket()?;

    let removed = Request::new(RTM_DELLINK, 0, &link_message(0, false))
        .with(IFLA_IFNAME, &c_name(DEVICE))
        .execute(&cell_socket);
    match removed {
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::NODEV.raw_os_error()) => {
            return Err(error);
        }
        Err(_) | Ok(()) => {}
    }
    let peer = [
        link_message(0, false),
        attribute(IFLA_IFNAME, &c_name(DEVICE)),
        attribute(IFLA_NET_NS_FD, &cell.as_raw_fd().to_ne_bytes()),
    ]
    .concat();
    let veth = [
        attribute(IFLA_INFO_KIND, b"veth\0"),
        attribute(IFLA_INFO_DATA, &attribute(VETH_INFO_PEER, &peer)),
    ]
    .concat();
    Request::new(RTM_NEWLINK, NLM_F_NEW, &link_message(0, false))
        .with(IFLA_IFNAME, &c_name(INNER))
        .with(IFLA_LINKINFO, &veth)
        .execute(&inner_socket)?;
    for (socket, device) in [(&cell_socket, DEVICE), (&inner_socket, INNER)] {
        link::set_up(socket, name_to_index(socket, device)?)?;
    }
    add_address(&cell_socket, DEVICE, CELL_ADDRESS)?;

    let mut listeners = Vec::with_capacity(servers);
    for address in (0..servers).map_while(address) {
        add_address(&inner_socket, INNER, address)?;
        let (udp, tcp) = (UdpSocket::bind((address, PORT))?, TcpListener::bind((address, PORT))?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        listeners.push(DnsListener { udp, tcp });
    }
    Ok(listeners)
}

fn c_name(device: &str) -> Vec<u8> {
    [device.as_bytes(), b"\0"].concat()
}

/// Adds an address to a link.
fn add_address(socket: impl AsFd, device: &str, address: Ipv4Addr) -> io::Result<()> {
    let index = name_to_index(&socket, device)?;
    link::add_address(socket, index, address.into(), PREFIX_LEN)
}
