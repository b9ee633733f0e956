//! UDP queries to a name server, in the node's network.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
};

use bytes::Bytes;
use kiyot_link::resolver::MAX_UDP_MESSAGE_BYTES;
use rustix::net::netdevice::name_to_index;
use tokio::net::UdpSocket;

use super::{Server, message};

const DNS_PORT: u16 = 53;

/// Sends a query by UDP and waits for the response without a deadline.
pub(super) async fn query(server: &Server, query: &[u8]) -> io::Result<Bytes> {
    query_socket(address(server).await?, query).await
}

pub(super) async fn query_socket(server: SocketAddr, query: &[u8]) -> io::Result<Bytes> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    // A connected socket receives from this name server only.
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; MAX_UDP_MESSAGE_BYTES + 1];
    loop {
        let length = socket.recv(&mut answer).await?;
        if !message::answers(&answer[..length], query) {
            continue;
        }
        if length > MAX_UDP_MESSAGE_BYTES {
            return Ok(message::truncated(query));
        }
        answer.truncate(length);
        return Ok(answer.into());
    }
}

/// Returns the socket address of a name server.
pub(super) async fn address(server: &Server) -> io::Result<SocketAddr> {
    let Some(address) = server.link_local() else { return Ok((server.address, DNS_PORT).into()) };
    let zone = match server.zone.parse() {
        Ok(number) => number,
        // Any socket works.
        Err(_) => name_to_index(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?, &server.zone)?,
    };
    Ok(SocketAddrV6::new(address, DNS_PORT, 0, zone).into())
}
