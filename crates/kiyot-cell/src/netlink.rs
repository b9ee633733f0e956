//! Requests to the kernel by rtnetlink: a head, a body of the request's kind, and attributes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, sendto,
    socket_with,
};

/// `NLMSG_ERROR` of linux/netlink.h: the answer, an error or 0.
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const FLAGS: u16 = 1 | 4;
/// The bytes of a message's head, and of an attribute's.
const HEAD: usize = 16;
const ATTRIBUTE_HEAD: usize = 4;

/// The group of those who hear of links, of linux/rtnetlink.h.
const RTMGRP_LINK: u32 = 1;

/// `NLM_F_CREATE | NLM_F_EXCL`: it must not be there yet.
pub const NEW: u16 = 0x400 | 0x200;

/// A socket of NETLINK_ROUTE for the network namespace of the calling thread.
pub fn socket() -> io::Result<OwnedFd> {
    // No protocol is protocol 0: NETLINK_ROUTE.
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// A socket that hears of every change of a link in the network namespace of the calling thread.
pub fn link_changes() -> io::Result<OwnedFd> {
    let socket = socket()?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, RTMGRP_LINK))?;
    Ok(socket)
}

/// One request, as it is sent.
#[derive(Debug)]
pub struct Request(Vec<u8>);

impl Request {
    /// A request of a kind (`RTM_...` of linux/rtnetlink.h), with more flags, and with the body of
    /// this kind.
    pub fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((FLAGS | flags).to_ne_bytes());
        bytes.extend(1_u32.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(body);
        Self(bytes)
    }

    /// The same with one more attribute.
    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend(attribute(kind, value));
        self
    }

    /// Sends it, and waits for the kernel's word, which comes at once.
    pub fn send(mut self, socket: impl AsFd) -> io::Result<()> {
        let length = u32::try_from(self.0.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.0[0..4].copy_from_slice(&length.to_ne_bytes());
        sendto(&socket, &self.0, SendFlags::empty(), &netlink::SocketAddrNetlink::new(0, 0))?;
        let mut answer = [0; 1024];
        let (_, length) = recv(&socket, &mut answer, RecvFlags::empty())?;
        acknowledged(&answer[..length.min(answer.len())])
    }
}

/// An attribute, as it is in a request or in another attribute.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    // Nothing here comes near 64 KiB.
    let length = u16::try_from(ATTRIBUTE_HEAD + value.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(usize::from(length).next_multiple_of(4));
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error =
        answer.get(HEAD..HEAD + 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(error)) => {
            Err(io::Error::from_raw_os_error(error.saturating_neg()))
        }
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "an answer of netlink that is no acknowledgement",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read() {
        let mut answer = [0; 36];
        assert!(acknowledged(&answer).is_err());
        answer[4] = NLMSG_ERROR as u8;
        assert!(acknowledged(&answer).is_ok());
        answer[16..20].copy_from_slice(&(-1_i32).to_ne_bytes());
        assert_eq!(acknowledged(&answer).unwrap_err().raw_os_error(), Some(1));
    }

    #[test]
    fn attributes_are_padded_and_their_length_is_not() {
        let bytes = attribute(3, b"lo\0xy");
        assert_eq!((bytes.len(), u16::from_ne_bytes([bytes[0], bytes[1]])), (12, 9));
    }
}
