//! One query by UDP to one name server, in the node's network.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
};

use bytes::Bytes;
use kiyot_link::resolver::MAX_UDP_MESSAGE_BYTES;
use rustix::net::netdevice::name_to_index;
use tokio::net::UdpSocket;

use super::{Server, message};

/// DNS.
const PORT: u16 = 53;

/// The answer to a query by UDP. Waits for it as long as it is polled.
pub(super) async fn ask(server: &Server, query: &[u8]) -> io::Result<Bytes> {
    by_udp(address(server).await?, query).await
}

pub(super) async fn by_udp(server: SocketAddr, query: &[u8]) -> io::Result<Bytes> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    // From then on it hears this name server alone.
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; MAX_UDP_MESSAGE_BYTES + 1];
    loop {
        let length = socket.recv(&mut answer).await?;
        if !message::answers(&answer[..length], query) {
            continue;
        }
        if length > MAX_UDP_MESSAGE_BYTES {
            return Ok(message::cut(query));
        }
        answer.truncate(length);
        return Ok(answer.into());
    }
}

/// Where a name server listens.
pub(super) async fn address(server: &Server) -> io::Result<SocketAddr> {
    let Some(address) = server.link_local() else { return Ok((server.address, PORT).into()) };
    let zone = match server.zone.parse() {
        Ok(number) => number,
        // Any socket will do.
        Err(_) => name_to_index(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?, &server.zone)?,
    };
    Ok(SocketAddrV6::new(address, PORT, 0, zone).into())
}
