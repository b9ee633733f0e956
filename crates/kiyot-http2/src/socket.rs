//! Unix socket with few system calls: registered for reading, and for writing only while its buffer
//! is full.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::net::{SendFlags, send};
use tokio::{
    io::{AsyncRead, ReadBuf},
    net::{UnixStream, unix::pipe},
};

/// Unix socket of a connection.
#[derive(Debug)]
pub(super) struct Socket {
    /// Registered for reading only: otherwise each read of the peer would wake this thread. tokio
    /// can't register a socket this way without `unsafe`, but treats a pipe's reading end as this
    /// descriptor needs.
    socket: pipe::Receiver,
    /// The same socket, registered for writing while its buffer is full.
    writable: Option<pipe::Sender>,
}

impl Socket {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        // tokio's sockets are non-blocking, and `into_std` keeps them so.
        let socket = pipe::Receiver::from_owned_fd_unchecked(OwnedFd::from(stream.into_std()?))?;
        Ok(Self { socket, writable: None })
    }

    /// Reads what fits; 0 at the end.
    pub(super) fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut input = ReadBuf::new(input);
            // A short read has emptied the socket: tokio waits for epoll before the next read.
            match ready!(Pin::new(&mut self.socket).poll_read(cx, &mut input)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return Poll::Ready(read.map(|()| input.filled().len())),
            }
        }
    }

    /// Writes at least one byte.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        output: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let socket = &self.socket;
            let send = || Ok(send(socket, output, SendFlags::NOSIGNAL)?);
            let sent = match &self.writable {
                Some(writable) => {
                    ready!(writable.poll_write_ready(cx))?;
                    writable.try_io(send)
                }
                None => send(),
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.writable.is_none() {
                        self.writable = Some(pipe::Sender::from_owned_fd_unchecked(
                            self.socket.as_fd().try_clone_to_owned()?,
                        )?);
                    }
                }
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                sent => return Poll::Ready(sent),
            }
        }
    }

    /// Ends the registration for writing once the output is written.
    pub(super) fn stop_write_interest(&mut self) {
        self.writable = None;
    }
}
