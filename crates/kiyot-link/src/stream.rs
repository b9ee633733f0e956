//! The transport of the link: a unix socket or TCP.

use std::{
    io,
    net::IpAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};

use crate::{
    bootstrap::GatewayAddress,
    http2::{AGENT_PING_INTERVAL, AGENT_PING_TIMEOUT},
};

/// The time for which the kernel keeps unacknowledged bytes: as long as the slower side's pings
/// need to end a silent connection. It detects no lost peer sooner. It ends the retransmissions of
/// a connection that was closed with bytes left, which otherwise last up to 15 minutes.
const TCP_USER_TIMEOUT: Duration = AGENT_PING_INTERVAL.saturating_add(AGENT_PING_TIMEOUT);

/// The most bytes that the kernel holds before it can send them (TCP_NOTSENT_LOWAT). Its buffer may
/// grow to megabytes, which a slow link carries in minutes, and a response would wait behind the
/// windows of all streams. HTTP/2 keeps the other bytes, and lets streams take turns.
const MAX_UNSENT_BYTES: u32 = 64 * 1024;

/// A byte stream between an agent and its gateway.
#[derive(Debug)]
pub enum Stream {
    /// A unix socket.
    Unix(UnixStream),
    /// A TCP connection.
    Tcp(TcpStream),
}

impl Stream {
    /// Dials the gateway, without a timeout.
    pub async fn dial(address: &GatewayAddress) -> io::Result<Self> {
        match address {
            GatewayAddress::Unix(path) => UnixStream::connect(path).await.map(Self::Unix),
            GatewayAddress::Tcp(address) => Self::over_tcp(TcpStream::connect(address).await?),
        }
    }

    /// Sets the options of a dialled or accepted TCP connection.
    pub fn over_tcp(stream: TcpStream) -> io::Result<Self> {
        // Small frames must not wait for the peer's acknowledgement.
        stream.set_nodelay(true)?;
        // No keepalive probes: an agent's kernel answers them, but the agent itself must answer
        // pings.
        let socket = SockRef::from(&stream);
        socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
        socket.set_tcp_notsent_lowat(MAX_UNSENT_BYTES)?;
        Ok(Self::Tcp(stream))
    }

    /// Returns the IP address of the peer of a TCP connection.
    pub fn peer_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(stream) => stream.peer_addr().ok().map(|peer| peer.ip().to_canonical()),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Verifies L18.
    #[tokio::test]
    async fn both_ends_send_small_frames_at_once_and_give_up_a_vanished_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = GatewayAddress::Tcp(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(Stream::dial(&address), listener.accept());
        for stream in [dialled.unwrap(), Stream::over_tcp(accepted.unwrap().0).unwrap()] {
            let Stream::Tcp(stream) = stream else { panic!("not TCP") };
            assert!(stream.nodelay().unwrap());
            let socket = SockRef::from(&stream);
            assert_eq!(socket.tcp_user_timeout().unwrap(), Some(TCP_USER_TIMEOUT));
            assert_eq!(socket.tcp_notsent_lowat().unwrap(), MAX_UNSENT_BYTES);
        }
    }
}
