//! The DHCP service of the VPC (RFC 2131). The MAC address of the interface identifies the
//! instance.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use socket2::{Domain, Socket, Type};
use tokio::net::UdpSocket;

use crate::{shared::Shared, vpc::BridgedSubnet};

/// Port of the service.
const SERVER_PORT: u16 = 67;
/// Port of clients.
const CLIENT_PORT: u16 = 68;
/// Most bytes that are read of a message.
const MAX_MESSAGE_BYTES: usize = 1500;
/// Bytes before the options of a message.
const HEADER_BYTES: usize = 240;
/// Magic cookie before the options.
const COOKIE: [u8; 4] = [0x63, 0x82, 0x53, 0x63];
/// Lifetime of a lease in seconds, as in a VPC.
const LEASE_SECONDS: u32 = 3600;

/// Types of messages: values of the option [`option::MESSAGE_TYPE`].
mod message {
    pub(super) const DISCOVER: u8 = 1;
    pub(super) const OFFER: u8 = 2;
    pub(super) const REQUEST: u8 = 3;
    pub(super) const ACK: u8 = 5;
}

/// Option codes.
mod option {
    pub(super) const PAD: u8 = 0;
    pub(super) const SUBNET_MASK: u8 = 1;
    pub(super) const ROUTER: u8 = 3;
    pub(super) const LEASE_TIME: u8 = 51;
    pub(super) const MESSAGE_TYPE: u8 = 53;
    pub(super) const SERVER: u8 = 54;
    pub(super) const END: u8 = 255;
}

/// The address of an instance, and its network.
#[derive(Debug, Clone, Copy)]
struct Lease {
    address: Ipv4Addr,
    gateway: Ipv4Addr,
    mask: Ipv4Addr,
}

/// Listens on a bridge of this thread's namespace.
///
/// # Errors
/// If the port is in use, or this process may not bind to a device.
pub(crate) fn listen(bridge: &str) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // Replies go to a client without an address, only on this bridge.
    socket.bind_device(Some(bridge.as_bytes()))?;
    socket.set_reuse_address(true)?;
    socket.set_broadcast(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, SERVER_PORT)).into())?;
    Ok(socket.into())
}

/// Serves the instances of a subnet until its task ends.
pub(crate) async fn serve(socket: UdpSocket, subnet: BridgedSubnet, shared: Arc<Shared>) {
    let mut buffer = [0; MAX_MESSAGE_BYTES];
    loop {
        let Ok((length, _)) = socket.recv_from(&mut buffer).await else { continue };
        let request = &buffer[..length];
        let lease = mac(request).and_then(|mac| lease_of(&mac, &subnet, &shared));
        if let Some(answer) = lease.and_then(|lease| answer(request, lease)) {
            let _ = socket.send_to(&answer, (Ipv4Addr::BROADCAST, CLIENT_PORT)).await;
        }
    }
}

/// Returns the MAC address of the client.
fn mac(request: &[u8]) -> Option<String> {
    let bytes: Vec<_> = request.get(28..34)?.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(bytes.join(":"))
}

fn lease_of(mac: &str, subnet: &BridgedSubnet, shared: &Shared) -> Option<Lease> {
    let state = shared.lock();
    let mut present = state.instances.values().filter(|instance| !instance.state.is_ended());
    let instance = present.find(|instance| instance.mac.eq_ignore_ascii_case(mac))?;
    let prefix: u32 = subnet.prefix.parse().ok()?;
    let mask = u32::MAX.checked_shl(u32::BITS.checked_sub(prefix)?).unwrap_or_default();
    Some(Lease {
        address: instance.address.parse().ok()?,
        gateway: subnet.gateway.parse().ok()?,
        mask: mask.into(),
    })
}

/// Returns the reply to a message; `None` if the message needs no reply.
fn answer(request: &[u8], lease: Lease) -> Option<Vec<u8>> {
    let (header, options) = request.split_at_checked(HEADER_BYTES)?;
    if header[0] != 1 || header[236..] != COOKIE {
        return None;
    }
    let kind = match message_type(options)? {
        message::DISCOVER => message::OFFER,
        message::REQUEST => message::ACK,
        _ => return None,
    };
    let mut answer = header.to_vec();
    answer[0] = 2;
    answer[16..20].copy_from_slice(&lease.address.octets());
    answer[20..24].copy_from_slice(&lease.gateway.octets());
    // Names of the server and of the boot file.
    answer[44..236].fill(0);
    answer.extend([option::MESSAGE_TYPE, 1, kind]);
    for (code, value) in [
        (option::SERVER, lease.gateway.octets()),
        (option::LEASE_TIME, LEASE_SECONDS.to_be_bytes()),
        (option::SUBNET_MASK, lease.mask.octets()),
        (option::ROUTER, lease.gateway.octets()),
    ] {
        answer.extend([code, 4]);
        answer.extend(value);
    }
    answer.push(option::END);
    Some(answer)
}

fn message_type(mut options: &[u8]) -> Option<u8> {
    loop {
        match options {
            [option::PAD, rest @ ..] => options = rest,
            [option::MESSAGE_TYPE, 1, kind, ..] => return Some(*kind),
            [code, length, rest @ ..] if *code != option::END => {
                options = rest.get(usize::from(*length)..)?;
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Lease = Lease {
        address: Ipv4Addr::new(10, 77, 16, 9),
        gateway: Ipv4Addr::new(10, 77, 16, 1),
        mask: Ipv4Addr::new(255, 255, 240, 0),
    };

    /// Returns a message with these options.
    fn message(options: &[u8]) -> Vec<u8> {
        let mut message = vec![0; HEADER_BYTES];
        message[..4].copy_from_slice(&[1, 1, 6, 0]);
        message[4..8].copy_from_slice(b"xid!");
        message[28..34].copy_from_slice(&[2, 0, 0xab, 0, 0, 1]);
        message[236..].copy_from_slice(&COOKIE);
        message.extend(options);
        message
    }

    #[test]
    fn client_gets_the_address_of_its_instance() {
        for (asked, answered) in [(message::DISCOVER, 2), (message::REQUEST, 5)] {
            let request = message(&[option::PAD, 12, 2, b'i', b'p', 53, 1, asked, option::END]);
            assert_eq!(mac(&request).unwrap(), "02:00:ab:00:00:01");
            let answer = answer(&request, LEASE).unwrap();
            assert_eq!((answer[0], &answer[4..8]), (2, &b"xid!"[..]));
            assert_eq!(answer[16..20], LEASE.address.octets());
            assert_eq!(message_type(&answer[HEADER_BYTES..]), Some(answered));
            assert!(answer.windows(6).any(|part| part == [1, 4, 255, 255, 240, 0]), "{answer:?}");
            assert!(answer.windows(6).any(|part| part == [3, 4, 10, 77, 16, 1]), "{answer:?}");
        }
    }

    #[test]
    fn other_messages_have_no_answer() {
        let release = message(&[53, 1, 7, option::END]);
        let cut_off = message(&[12, 200, 0]);
        let empty = message(&[]);
        let mut without_cookie = message(&[53, 1, 1, option::END]);
        without_cookie[236] = 0;
        for request in [release, cut_off, empty, without_cookie, vec![1; 30], Vec::new()] {
            assert_eq!(answer(&request, LEASE), None, "{request:?}");
        }
    }
}
