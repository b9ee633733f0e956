//! A unix socket, with few system calls: it is registered for reading alone, and for writing while
//! there is no room.

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

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Socket {
    /// Registered for reading alone: each part that the peer takes of a unix socket would else wake
    /// this thread to tell that there is room again. tokio has no socket that is registered so but
    /// by `unsafe`; the end of a pipe is the same, a descriptor that is read.
    socket: pipe::Receiver,
    /// The same socket, registered for writing, while there is no room.
    no_room: Option<pipe::Sender>,
}

impl Socket {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        // tokio's own sockets do not block; `into_std` leaves that as it is.
        let socket = pipe::Receiver::from_owned_fd_unchecked(OwnedFd::from(stream.into_std()?))?;
        Ok(Self { socket, no_room: None })
    }

    /// Reads what fits; 0 at the end.
    pub(super) fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut input = ReadBuf::new(input);
            // What fills less than the buffer is all that the socket has: tokio then waits for
            // epoll before it reads again.
            match ready!(Pin::new(&mut self.socket).poll_read(cx, &mut input)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return Poll::Ready(read.map(|()| input.filled().len())),
            }
        }
    }

    /// Writes what there is room for, one byte at least.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        output: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let socket = &self.socket;
            let send = || Ok(send(socket, output, SendFlags::NOSIGNAL)?);
            let sent = match &self.no_room {
                Some(no_room) => {
                    ready!(no_room.poll_write_ready(cx))?;
                    no_room.try_io(send)
                }
                None => send(),
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.no_room.is_none() {
                        self.no_room = Some(pipe::Sender::from_owned_fd_unchecked(
                            self.socket.as_fd().try_clone_to_owned()?,
                        )?);
                    }
                }
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                sent => return Poll::Ready(sent),
            }
        }
    }

    /// All was written: the next write needs not wait for room.
    pub(super) fn all_sent(&mut self) {
        self.no_room = None;
    }
}
