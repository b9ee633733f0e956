//! Brings up the loopback interface, by netlink: a new network namespace has it down.

use std::io;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto, socket_with};

/// `RTM_NEWLINK` of linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
/// `NLMSG_ERROR` of linux/netlink.h: the answer, an error or 0.
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const FLAGS: u16 = 1 | 4;
/// `IFF_UP` of linux/if.h.
const IFF_UP: u32 = 1;
/// The loopback is each namespace's first interface.
const LOOPBACK_INDEX: i32 = 1;
/// A header (16 bytes) and an `ifinfomsg` (16 bytes).
const LENGTH: usize = 32;

/// Brings up `lo` of the caller's network namespace.
pub fn up() -> io::Result<()> {
    // No protocol is protocol 0: NETLINK_ROUTE.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    sendto(&socket, &request(), SendFlags::empty(), &netlink::SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0; 1024];
    let (_, length) = recv(&socket, &mut answer, RecvFlags::empty())?;
    acknowledged(&answer[..length.min(answer.len())])
}

fn request() -> [u8; LENGTH] {
    let mut message = [0; LENGTH];
    message[0..4].copy_from_slice(&(LENGTH as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message[6..8].copy_from_slice(&FLAGS.to_ne_bytes());
    message[8..12].copy_from_slice(&1_u32.to_ne_bytes());
    message[20..24].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    message[24..28].copy_from_slice(&IFF_UP.to_ne_bytes());
    message[28..32].copy_from_slice(&IFF_UP.to_ne_bytes());
    message
}

fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "an answer of netlink that is no acknowledgement")),
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
}
