//! Netlink messages: requests with attributes, acknowledgements and dumps (netlink(7)).

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, sendto,
    socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

/// `NLM_F_CREATE | NLM_F_EXCL`: fails if the object exists.
pub const NLM_F_NEW: u16 = 0x400 | 0x200;
/// `NLM_F_CREATE | NLM_F_REPLACE`: creates the object, or replaces it.
pub const NLM_F_SET: u16 = 0x400 | 0x100;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// `RTM_NEWLINK` of linux/rtnetlink.h. Changes the link if it exists.
pub const RTM_NEWLINK: u16 = 16;
/// `RTMGRP_LINK` of linux/rtnetlink.h.
const RTMGRP_LINK: u32 = 1;
/// `RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE` of linux/rtnetlink.h.
const RTMGRP_ROUTE: u32 = 0x40 | 0x400;
/// `IFF_UP` of linux/if.h.
const IFF_UP: u32 = 1;

/// Flags in the type of an attribute: nested, and network byte order.
const ATTRIBUTE_TYPE_FLAGS: u16 = 0xc000;

const MESSAGE_HEADER_BYTES: usize = 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Size of a buffer for an acknowledgement. An acknowledgement contains the request.
const ACK_BUFFER_BYTES: usize = 4 * 1024;
/// Largest datagram that the kernel sends in a dump.
const DUMP_BUFFER_BYTES: usize = 64 * 1024;

/// Opens a `NETLINK_ROUTE` socket for the network namespace of the calling thread.
pub fn route_socket() -> io::Result<OwnedFd> {
    // NETLINK_ROUTE is protocol 0, the default.
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Opens a socket that receives a message for each change of a link in the calling thread's network
/// namespace.
pub fn link_changes() -> io::Result<OwnedFd> {
    let socket = route_socket()?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, RTMGRP_LINK))?;
    Ok(socket)
}

/// Opens a socket that receives a message for each change of a route in the calling thread's
/// network namespace. Reads time out after `timeout`.
pub fn route_changes(timeout: Duration) -> io::Result<OwnedFd> {
    let socket = route_socket()?;
    set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, RTMGRP_ROUTE))?;
    Ok(socket)
}

/// Opens a `NETLINK_NETFILTER` socket. Reads time out after `timeout`.
pub fn netfilter_socket(timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?;
    set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
    Ok(socket)
}

/// Returns an `ifinfomsg`: family and type, index, flags, mask of changed flags. Index 0 means no
/// link, or a link that an attribute names.
pub fn link_message(index: u32, up: bool) -> Vec<u8> {
    let flags = if up { IFF_UP } else { 0 };
    [&[0; 4][..], &index.to_ne_bytes(), &flags.to_ne_bytes(), &flags.to_ne_bytes()].concat()
}

/// A request to the kernel.
#[derive(Debug)]
pub struct Request(Vec<u8>);

impl Request {
    /// Creates a request of a message type with additional flags. `body` is the header of this
    /// type, such as an `ifinfomsg`.
    pub fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend(1_u32.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(body);
        Self(bytes)
    }

    /// Adds an attribute.
    #[must_use]
    pub fn with(self, kind: u16, value: &[u8]) -> Self {
        self.with_encoded(&attribute(kind, value))
    }

    /// Adds encoded attributes.
    #[must_use]
    pub fn with_encoded(mut self, attributes: &[u8]) -> Self {
        self.0.extend(attributes);
        self
    }

    /// Sends the request and waits for its acknowledgement.
    pub fn execute(self, socket: impl AsFd) -> io::Result<()> {
        self.send(&socket, NLM_F_ACK)?;
        let mut buffer = [0; ACK_BUFFER_BYTES];
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let (_, body) = messages(&buffer[..length])
            .find(|(kind, _)| *kind == NLMSG_ERROR)
            .ok_or_else(|| invalid_data("netlink response without an acknowledgement"))?;
        acknowledgement(body)
    }

    /// Sends the request for a dump, and passes each message of the response to `handle`: its type,
    /// and the body after its header.
    pub fn dump(self, socket: impl AsFd, mut handle: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(&socket, NLM_F_DUMP)?;
        let mut buffer = vec![0; DUMP_BUFFER_BYTES];
        loop {
            let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
            for (kind, body) in messages(&buffer[..length]) {
                match kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => {
                        acknowledgement(body)?;
                        return Err(invalid_data("netlink dump ended by an acknowledgement"));
                    }
                    kind => handle(kind, body),
                }
            }
        }
    }

    fn send(mut self, socket: impl AsFd, flags: u16) -> io::Result<()> {
        let length = u32::try_from(self.0.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        let flags = u16::from_ne_bytes([self.0[6], self.0[7]]) | flags;
        self.0[6..8].copy_from_slice(&flags.to_ne_bytes());
        let kernel = netlink::SocketAddrNetlink::new(0, 0);
        sendto(&socket, &self.0, SendFlags::empty(), &kernel)?;
        Ok(())
    }
}

/// Reads the error number in an acknowledgement; 0 means success.
fn acknowledgement(body: &[u8]) -> io::Result<()> {
    let number = body.first_chunk().map(|number| i32::from_ne_bytes(*number));
    match number.ok_or_else(|| invalid_data("netlink acknowledgement is too short"))? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error.saturating_neg())),
    }
}

fn invalid_data(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Encodes an attribute with its padding.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    // No attribute of this crate comes near 64 KiB.
    let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(usize::from(length).next_multiple_of(4));
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// A decoded attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Type, without flags.
    pub kind: u16,
    /// Value, without padding.
    pub value: &'a [u8],
    /// The encoded attribute, with its header and padding.
    pub encoded: &'a [u8],
}

/// Decodes consecutive attributes, up to the first truncated attribute.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = Attribute<'_>> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & !ATTRIBUTE_TYPE_FLAGS;
        let value = bytes.get(ATTRIBUTE_HEADER_BYTES..length)?;
        let (encoded, rest) =
            bytes.split_at_checked(length.next_multiple_of(4)).unwrap_or((bytes, &[]));
        bytes = rest;
        Some(Attribute { kind, value, encoded })
    })
}

/// Returns the value of the first attribute of a type.
pub fn find_attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|attribute| attribute.kind == kind).map(|attribute| attribute.value)
}

/// Decodes the messages of a datagram into type and body, up to the first truncated message.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
        let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        let body = bytes.get(MESSAGE_HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn acknowledgement_with_a_number_is_its_error() {
        assert!(acknowledgement(&0_i32.to_ne_bytes()).is_ok());
        let refused = acknowledgement(&(-1_i32).to_ne_bytes()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(1));
        assert!(acknowledgement(&[0; 3]).is_err());
    }

    #[test]
    fn attribute_is_padded_and_its_length_is_not() {
        let bytes = attribute(3, b"lo\0xy");
        assert_eq!((bytes.len(), u16::from_ne_bytes([bytes[0], bytes[1]])), (12, 9));
    }

    #[test]
    fn encoded_attributes_are_decoded_without_type_flags() {
        let bytes = [attribute(1 | 0x8000, b"abc"), attribute(2, b"")].concat();
        let decoded: Vec<_> = attributes(&bytes).map(|found| (found.kind, found.value)).collect();
        assert_eq!(decoded, [(1, &b"abc"[..]), (2, b"")]);
        let encoded: Vec<_> = attributes(&bytes).flat_map(|found| found.encoded).copied().collect();
        assert_eq!(encoded, bytes);
        assert_eq!(find_attribute(&bytes, 3), None);
    }

    #[test]
    fn loopback_of_this_namespace_is_dumped() {
        const RTM_GETLINK: u16 = 18;
        const IFLA_IFNAME: u16 = 3;
        let mut names = Vec::new();
        Request::new(RTM_GETLINK, 0, &link_message(0, false))
            .dump(route_socket().unwrap(), |_, body| {
                names.extend(find_attribute(&body[16..], IFLA_IFNAME).map(<[u8]>::to_vec));
            })
            .unwrap();
        assert!(names.contains(&b"lo\0".to_vec()), "{names:?}");
    }

    #[test]
    fn request_that_the_kernel_rejects_fails_with_its_error() {
        const RTM_DELLINK: u16 = 17;
        const ENODEV: i32 = 19;
        const EPERM: i32 = 1;
        let missing = Request::new(RTM_DELLINK, 0, &link_message(u32::MAX >> 1, false));
        let error = missing.execute(route_socket().unwrap()).unwrap_err().raw_os_error();
        assert!(error == Some(ENODEV) || error == Some(EPERM), "{error:?}");
    }

    proptest! {
        #[test]
        fn arbitrary_datagram_is_decoded_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200)
        ) {
            for (_, body) in messages(&bytes) {
                attributes(body).for_each(drop);
            }
            attributes(&bytes).for_each(drop);
        }
    }
}
