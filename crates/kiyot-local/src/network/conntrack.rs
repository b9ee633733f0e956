//! Deletes conntrack entries of host ports. A remembered flow bypasses new rules: a flow that began
//! before its port was mapped, or that goes on after the mapping was removed.
//!
//! TCP needs no deletion: a port's rules exist before its pod, and the pod's connections end with
//! it. A UDP client that goes on sending from the same port never meets the new rules, so that its
//! entries are deleted.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use kiyot_engine::provider::{HostPort, Protocol};
use kiyot_linux::netlink::{self, Request, attributes, find_attribute};
use rustix::net::AddressFamily;

/// `NFNL_SUBSYS_CTNETLINK` with its messages (linux/netfilter/nfnetlink_conntrack.h).
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;
/// The size of an `nfgenmsg`, in bytes.
const NETFILTER_HEADER_BYTES: usize = 4;
/// Bounds the wait for a datagram of the kernel.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Deletes the kernel's entries of UDP flows to these ports, IPv4 and IPv6, and returns their
/// number. Blocks while it lists all flows of the node.
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

/// A UDP flow, by its first packet.
#[derive(Debug, PartialEq, Eq)]
struct Flow {
    to: IpAddr,
    port: u16,
    /// The encoded attributes that identify the flow.
    name: Vec<u8>,
}

/// Returns an `nfgenmsg` of an address family; 0 stands for any.
fn netfilter_header(family: u8) -> [u8; NETFILTER_HEADER_BYTES] {
    [family, 0, 0, 0]
}

fn dump(wanted: impl Fn(&Flow) -> bool) -> io::Result<Vec<Flow>> {
    let socket = netlink::netfilter_socket(RESPONSE_TIMEOUT)?;
    let mut found = Vec::new();
    Request::new(GET, 0, &netfilter_header(0)).dump(socket, |kind, body| {
        if kind == NEW {
            found.extend(flow(body).filter(&wanted));
        }
    })?;
    Ok(found)
}

fn delete(flow: &Flow) -> io::Result<()> {
    let family = if flow.to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let family = u8::try_from(family.as_raw()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let request = Request::new(DELETE, 0, &netfilter_header(family)).with_encoded(&flow.name);
    match request.execute(netlink::netfilter_socket(RESPONSE_TIMEOUT)?) {
        // The flow has ended meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        deleted => deleted,
    }
}

/// Parses a UDP flow; `None` for other protocols.
fn flow(body: &[u8]) -> Option<Flow> {
    let encoded = body.get(NETFILTER_HEADER_BYTES..)?;
    let tuple = find_attribute(encoded, CTA_TUPLE_ORIG)?;
    let protocol = find_attribute(tuple, CTA_TUPLE_PROTO)?;
    if find_attribute(protocol, CTA_PROTO_NUM)? != [UDP] {
        return None;
    }
    let port = u16::from_be_bytes(find_attribute(protocol, CTA_PROTO_DST_PORT)?.try_into().ok()?);
    let addresses = find_attribute(tuple, CTA_TUPLE_IP)?;
    let of_4 = || {
        find_attribute(addresses, CTA_IP_V4_DST)
            .and_then(|bytes| <[u8; 4]>::try_from(bytes).ok())
            .map(|bytes| Ipv4Addr::from(bytes).into())
    };
    let of_6 = || {
        find_attribute(addresses, CTA_IP_V6_DST)
            .and_then(|bytes| <[u8; 16]>::try_from(bytes).ok())
            .map(|bytes| Ipv6Addr::from(bytes).into())
    };
    let to = of_4().or_else(of_6)?;
    let name = attributes(encoded)
        .filter(|attribute| [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE].contains(&attribute.kind));
    Some(Flow {
        to,
        port,
        name: name.flat_map(|attribute| attribute.encoded.iter().copied()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use kiyot_linux::netlink::attribute;
    use proptest::prelude::*;

    use super::*;

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
    fn flow_is_parsed_into_its_ports() {
        let read = flow(&body(UDP, 5353)).unwrap();
        assert_eq!((read.to, read.port), ([10, 0, 0, 2].into(), 5353));
        let kinds: Vec<_> = attributes(&read.name).map(|attribute| attribute.kind).collect();
        assert_eq!(kinds, [CTA_TUPLE_ORIG, CTA_ID]);
        assert_eq!(flow(&body(6, 5353)), None);
    }

    proptest! {
        #[test]
        fn message_of_any_bytes_is_accepted(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            cut in 0..100_usize
        ) {
            let _ = flow(&bytes);
            let whole = body(UDP, 1);
            let _ = flow(&whole[..cut.min(whole.len())]);
        }
    }
}
