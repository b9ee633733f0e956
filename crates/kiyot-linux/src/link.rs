//! Network devices with their addresses and routes (rtnetlink(7)).
//!
//! All functions act in the network namespace of their socket ([`crate::netlink::route_socket`]).

use std::{
    io,
    net::IpAddr,
    num::NonZeroU32,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use crate::netlink::{
    NLM_F_NEW, NLM_F_SET, RTM_NEWLINK, Request, attribute, attributes, link_message,
};

/// Message types of linux/rtnetlink.h.
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_NEWNEIGH: u16 = 28;
/// Attributes of linux/if_link.h.
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_NET_NS_FD: u16 = 28;
/// Attributes and flags of linux/if_addr.h.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 2;
const IFA_F_NOPREFIXROUTE: u32 = 0x200;
/// Attributes and values of linux/rtnetlink.h.
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_METRICS: u16 = 8;
const RTAX_MTU: u16 = 2;
const RTNH_F_ONLINK: u32 = 4;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
const RTN_UNREACHABLE: u8 = 7;
/// Attributes and values of linux/neighbour.h.
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Size of an `ifinfomsg`, which precedes the attributes of a link.
const LINK_MESSAGE_BYTES: usize = 16;

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The index, unique in its network namespace.
    pub index: u32,
    /// The name.
    pub name: String,
    /// The hardware address; `None` if the device has none or another kind.
    pub mac: Option<[u8; 6]>,
}

/// The next hop of a route.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Via {
    /// The gateway; `None` for a destination on the link.
    pub gateway: Option<IpAddr>,
    /// True if the gateway is on the link although no route covers it.
    pub on_link: bool,
    /// The largest packet, in bytes; `None` for the device's MTU.
    pub mtu: Option<NonZeroU32>,
}

/// Returns the network devices.
pub fn list(socket: impl AsFd) -> io::Result<Vec<Link>> {
    let mut links = Vec::new();
    Request::new(RTM_GETLINK, 0, &link_message(0, false)).dump(socket, |kind, body| {
        if kind == RTM_NEWLINK {
            links.extend(parse(body));
        }
    })?;
    Ok(links)
}

fn parse(body: &[u8]) -> Option<Link> {
    let index = u32::from_ne_bytes(*body.get(4..8)?.first_chunk()?);
    let mut link = Link { index, name: String::new(), mac: None };
    for attribute in attributes(body.get(LINK_MESSAGE_BYTES..)?) {
        match attribute.kind {
            IFLA_IFNAME => {
                let name = attribute.value.split(|byte| *byte == 0).next().unwrap_or_default();
                link.name = String::from_utf8_lossy(name).into_owned();
            }
            IFLA_ADDRESS => link.mac = attribute.value.try_into().ok(),
            _ => {}
        }
    }
    Some(link)
}

/// Sets a device up.
pub fn set_up(socket: impl AsFd, index: u32) -> io::Result<()> {
    Request::new(RTM_NEWLINK, 0, &link_message(index, true)).execute(socket)
}

/// Renames a device. The device must be down.
pub fn rename(socket: impl AsFd, index: u32, name: &str) -> io::Result<()> {
    Request::new(RTM_NEWLINK, 0, &link_message(index, false))
        .with(IFLA_IFNAME, &[name.as_bytes(), b"\0"].concat())
        .execute(socket)
}

/// Sets the hardware address and MTU of a device, and sets it up.
pub fn configure(socket: impl AsFd, index: u32, mac: [u8; 6], mtu: u32) -> io::Result<()> {
    Request::new(RTM_NEWLINK, 0, &link_message(index, true))
        .with(IFLA_ADDRESS, &mac)
        .with(IFLA_MTU, &mtu.to_ne_bytes())
        .execute(socket)
}

/// Moves a device to another network namespace. The device is down there.
pub fn move_to(socket: impl AsFd, index: u32, namespace: BorrowedFd<'_>) -> io::Result<()> {
    Request::new(RTM_NEWLINK, 0, &link_message(index, false))
        .with(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes())
        .execute(socket)
}

/// Adds an address to a device. Fails if the device has the address.
pub fn add_address(
    socket: impl AsFd,
    index: u32,
    address: IpAddr,
    prefix_len: u8,
) -> io::Result<()> {
    address_request(NLM_F_NEW, index, address, prefix_len).execute(socket)
}

/// Gives a device an address unless it has the address, with or without a route to the address's
/// network. IPv6 skips duplicate address detection, because CNI plugins do it when they choose an
/// address.
pub fn set_address(
    socket: impl AsFd,
    index: u32,
    address: IpAddr,
    prefix_len: u8,
    with_route: bool,
) -> io::Result<()> {
    let flags = if with_route { IFA_F_NODAD } else { IFA_F_NODAD | IFA_F_NOPREFIXROUTE };
    address_request(NLM_F_SET, index, address, prefix_len)
        .with(IFA_FLAGS, &flags.to_ne_bytes())
        .execute(socket)
}

fn address_request(flags: u16, index: u32, address: IpAddr, prefix_len: u8) -> Request {
    let (family, octets) = octets(address);
    // An `ifaddrmsg`: family, prefix length, flags, scope, link index.
    let body = [&[family, prefix_len, 0, 0][..], &index.to_ne_bytes()].concat();
    Request::new(RTM_NEWADDR, flags, &body).with(IFA_LOCAL, &octets).with(IFA_ADDRESS, &octets)
}

/// Sets a route through a device to a network.
pub fn set_route(
    socket: impl AsFd,
    index: u32,
    destination: (IpAddr, u8),
    Via { gateway, on_link, mtu }: Via,
) -> io::Result<()> {
    let scope = if gateway.is_some() { RT_SCOPE_UNIVERSE } else { RT_SCOPE_LINK };
    let flags = if on_link { RTNH_F_ONLINK } else { 0 };
    let mut request = route_request(destination, scope, RTN_UNICAST, flags);
    if let Some(gateway) = gateway {
        request = request.with(RTA_GATEWAY, &octets(gateway).1);
    }
    if let Some(mtu) = mtu {
        request = request.with(RTA_METRICS, &attribute(RTAX_MTU, &mtu.get().to_ne_bytes()));
    }
    request.with(RTA_OIF, &index.to_ne_bytes()).execute(socket)
}

/// Sets the hardware address of a neighbour, so that the kernel never resolves it.
pub fn set_neighbour(
    socket: impl AsFd,
    index: u32,
    address: IpAddr,
    mac: [u8; 6],
) -> io::Result<()> {
    let (family, octets) = octets(address);
    // An `ndmsg`: family, padding, link index, state, flags, type.
    let head = [&[family, 0, 0, 0][..], &index.to_ne_bytes()].concat();
    let body = [&head[..], &NUD_PERMANENT.to_ne_bytes(), &[0, 0]].concat();
    Request::new(RTM_NEWNEIGH, NLM_F_SET, &body)
        .with(NDA_DST, &octets)
        .with(NDA_LLADDR, &mac)
        .execute(socket)
}

/// Makes an address unreachable: connections to it fail at once.
pub fn close_address(socket: impl AsFd, address: IpAddr) -> io::Result<()> {
    let prefix_len = if address.is_ipv4() { 32 } else { 128 };
    route_request((address, prefix_len), RT_SCOPE_UNIVERSE, RTN_UNREACHABLE, 0).execute(socket)
}

fn route_request(
    (destination, prefix_len): (IpAddr, u8),
    scope: u8,
    kind: u8,
    flags: u32,
) -> Request {
    let (family, octets) = octets(destination);
    // An `rtmsg`: family, lengths of destination and source, TOS, table, protocol, scope, type,
    // flags.
    let header = [family, prefix_len, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, kind];
    let header = [&header[..], &flags.to_ne_bytes()].concat();
    let request = Request::new(RTM_NEWROUTE, NLM_F_SET, &header);
    if prefix_len > 0 { request.with(RTA_DST, &octets) } else { request }
}

fn octets(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, address.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::route_socket;

    #[test]
    fn loopback_is_listed() {
        let links = list(route_socket().unwrap()).unwrap();
        assert!(links.iter().any(|link| link.name == "lo"), "{links:?}");
    }

    #[test]
    fn link_has_index_name_and_hardware_address() {
        let mac = [2, 0, 0x5e, 0, 0x53, 1];
        let message = [
            link_message(7, true),
            attribute(IFLA_IFNAME, b"eth0\0"),
            attribute(IFLA_ADDRESS, &mac),
        ]
        .concat();
        let expected = Link { index: 7, name: "eth0".to_owned(), mac: Some(mac) };
        assert_eq!(parse(&message), Some(expected));
        assert_eq!(parse(&message[..10]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_message_is_parsed_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..100)
        ) {
            let _ = parse(&bytes);
        }
    }
}
