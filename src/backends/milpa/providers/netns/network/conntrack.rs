//! Flows that the kernel remembers: one that began before its port was mapped, or goes on when it
//! is mapped no more, would go on past the rules for as long as it is remembered.
//!
//! TCP begins anew by itself, as a port's rules come before its pod, and its connections end with
//! it. UDP has no beginning and no end: a client that goes on sending from the same port never
//! meets the rules, so its entries are deleted.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto,
    socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use super::super::super::{HostPort, Protocol};

/// `NFNL_SUBSYS_CTNETLINK` with its messages, of linux/netfilter/nfnetlink_conntrack.h.
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
/// Of linux/netlink.h.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Attributes.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// What is beside the kind in an attribute's type: nested, and in the net's byte order.
const TYPE_FLAGS: u16 = 0xc000;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;
/// Bytes of a message's head, and of the head of netfilter in it.
const HEAD: usize = 16;
const NETFILTER_HEAD: usize = 4;
/// As much as the kernel writes at once.
const BUFFER: usize = 64 * 1024;
/// How long the kernel may take for one part of an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Has the kernel forget the flows by UDP to these ports, IPv4 and IPv6. Blocks for as long as it
/// takes to list all flows of the node.
pub(super) fn forget(ports: &[HostPort]) -> io::Result<usize> {
    let wanted: Vec<_> = ports.iter().filter(|port| port.protocol == Protocol::Udp).collect();
    if wanted.is_empty() {
        return Ok(0);
    }
    let found = dump(|flow| {
        wanted
            .iter()
            .any(|port| port.host_port == flow.port && port.host_ip.is_none_or(|ip| ip == flow.to))
    })?;
    for flow in &found {
        delete(flow)?;
    }
    Ok(found.len())
}

/// A flow by UDP, as it began.
#[derive(Debug, PartialEq, Eq)]
struct Flow {
    to: IpAddr,
    port: u16,
    /// Its attributes that name it, as they came.
    name: Vec<u8>,
}

fn socket() -> io::Result<rustix::fd::OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER))?;
    Ok(socket)
}

/// A request for a family of addresses (0: any).
fn request(kind: u16, flags: u16, family: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(HEAD + NETFILTER_HEAD + attributes.len())
        .map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend(1_u32.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([family, 0, 0, 0]);
    bytes.extend(attributes);
    Ok(bytes)
}

fn dump(wanted: impl Fn(&Flow) -> bool) -> io::Result<Vec<Flow>> {
    let socket = socket()?;
    sendto(
        &socket,
        &request(GET, NLM_F_DUMP, 0, &[])?,
        SendFlags::empty(),
        &netlink::SocketAddrNetlink::new(0, 0),
    )?;
    let mut buffer = vec![0; BUFFER];
    let mut found = Vec::new();
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        for (kind, body) in Messages(&buffer[..length]) {
            match kind {
                NEW => found.extend(flow(body).filter(&wanted)),
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => {
                    return Err(error_of(body).unwrap_or_else(|| io::ErrorKind::InvalidData.into()));
                }
                _ => {}
            }
        }
    }
}

fn delete(flow: &Flow) -> io::Result<()> {
    let socket = socket()?;
    let family = if flow.to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let family = u8::try_from(family.as_raw()).map_err(|_| io::ErrorKind::InvalidInput)?;
    sendto(
        &socket,
        &request(DELETE, NLM_F_ACK, family, &flow.name)?,
        SendFlags::empty(),
        &netlink::SocketAddrNetlink::new(0, 0),
    )?;
    let mut buffer = [0; 4096];
    let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
    let answer = Messages(&buffer[..length])
        .find(|(kind, _)| *kind == NLMSG_ERROR)
        .and_then(|(_, body)| error_of(body));
    match answer {
        // It ended meanwhile.
        Some(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Some(_) | None => Ok(()),
    }
}

/// The error of an answer; `None` for one that says that all is well.
fn error_of(body: &[u8]) -> Option<io::Error> {
    let number = i32::from_ne_bytes(body.get(..4)?.try_into().ok()?);
    (number != 0).then(|| io::Error::from_raw_os_error(number.saturating_neg()))
}

/// A flow by UDP; `None` for any other.
fn flow(body: &[u8]) -> Option<Flow> {
    let attributes = body.get(NETFILTER_HEAD..)?;
    let tuple = find(attributes, CTA_TUPLE_ORIG)?;
    let protocol = find(tuple, CTA_TUPLE_PROTO)?;
    if find(protocol, CTA_PROTO_NUM)? != [UDP] {
        return None;
    }
    let port = u16::from_be_bytes(find(protocol, CTA_PROTO_DST_PORT)?.try_into().ok()?);
    let addresses = find(tuple, CTA_TUPLE_IP)?;
    let of_4 = || {
        find(addresses, CTA_IP_V4_DST)
            .and_then(|bytes| <[u8; 4]>::try_from(bytes).ok())
            .map(|bytes| Ipv4Addr::from(bytes).into())
    };
    let of_6 = || {
        find(addresses, CTA_IP_V6_DST)
            .and_then(|bytes| <[u8; 16]>::try_from(bytes).ok())
            .map(|bytes| Ipv6Addr::from(bytes).into())
    };
    let to = of_4().or_else(of_6)?;
    let name = Attributes(attributes)
        .filter(|attribute| [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE].contains(&attribute.kind));
    Some(Flow {
        to,
        port,
        name: name.flat_map(|attribute| attribute.whole.iter().copied()).collect(),
    })
}

fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    Attributes(attributes).find(|attribute| attribute.kind == kind).map(|attribute| attribute.value)
}

/// The messages in what was received: kind, and what is after the head. Ends at one that is cut.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::try_from(u32::from_ne_bytes(self.0.get(..4)?.try_into().ok()?)).ok()?;
        let kind = u16::from_ne_bytes(self.0.get(4..6)?.try_into().ok()?);
        let body = self.0.get(HEAD..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    }
}

/// An attribute.
struct Attribute<'a> {
    kind: u16,
    value: &'a [u8],
    /// With its head and what fills it up.
    whole: &'a [u8],
}

/// Attributes one after another. Ends at one that is cut.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = Attribute<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16::from_ne_bytes(self.0.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(self.0.get(2..4)?.try_into().ok()?) & !TYPE_FLAGS;
        let value = self.0.get(4..length)?;
        let (whole, rest) =
            self.0.split_at_checked(length.next_multiple_of(4)).unwrap_or((self.0, &[]));
        self.0 = rest;
        Some(Attribute { kind, value, whole })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn body(protocol: u8, port: u16) -> Vec<u8> {
        let addresses =
            [attribute(1, &[10, 0, 0, 1]), attribute(CTA_IP_V4_DST, &[10, 0, 0, 2])].concat();
        let protocol = [
            attribute(CTA_PROTO_NUM, &[protocol]),
            attribute(2, &[1, 2]),
            attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes()),
        ]
        .concat();
        let tuple = [
            attribute(CTA_TUPLE_IP | 0x8000, &addresses),
            attribute(CTA_TUPLE_PROTO | 0x8000, &protocol),
        ]
        .concat();
        [
            vec![2, 0, 0, 0],
            attribute(CTA_TUPLE_ORIG | 0x8000, &tuple),
            attribute(2, &[0; 8]),
            attribute(CTA_ID, &[0, 0, 0, 9]),
        ]
        .concat()
    }

    #[test]
    fn a_flow_is_read_and_named() {
        let read = flow(&body(UDP, 5353)).unwrap();
        assert_eq!((read.to, read.port), ([10, 0, 0, 2].into(), 5353));
        let kinds: Vec<_> = Attributes(&read.name).map(|attribute| attribute.kind).collect();
        assert_eq!(kinds, [CTA_TUPLE_ORIG, CTA_ID]);
        assert_eq!(flow(&body(6, 5353)), None);
    }

    proptest! {
        #[test]
        fn whatever_the_kernel_writes_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0..100_usize) {
            for (_, body) in Messages(&bytes) {
                let _ = flow(body);
            }
            let whole = body(UDP, 1);
            let _ = flow(&whole[..cut.min(whole.len())]);
        }
    }
}
