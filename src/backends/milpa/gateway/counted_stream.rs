//! A connection with counted bytes.

use std::{
    io,
    net::IpAddr,
    pin::Pin,
    task::{Context, Poll},
};

use kiyot_link::stream::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::metrics::ByteCounter;

/// Counters of the bytes of all connections, including TLS.
#[derive(Debug, Clone, Default)]
pub(super) struct LinkBytes {
    pub(super) received: ByteCounter,
    pub(super) sent: ByteCounter,
}

/// A connection with counted bytes.
#[derive(Debug)]
pub(super) struct CountedStream {
    stream: Stream,
    bytes: LinkBytes,
}

impl CountedStream {
    pub(super) fn new(stream: Stream, bytes: LinkBytes) -> Self {
        Self { stream, bytes }
    }

    /// Returns whether this is a TCP connection.
    pub(super) fn is_tcp(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// Returns the IP address of the peer of a TCP connection.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        self.stream.peer_ip()
    }

    fn count_sent(&self, sent: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(length)) = &sent {
            self.bytes.sent.add(*length);
        }
        sent
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (this, before) = (self.get_mut(), buffer.filled().len());
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.bytes.received.add(buffer.filled().len().saturating_sub(before));
        read
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.count_sent(sent)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write_vectored(context, bytes);
        this.count_sent(sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
