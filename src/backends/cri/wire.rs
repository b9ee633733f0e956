//! A unix socket under an HTTP/2 connection, with few system calls: small writes are collected and leave together, reads are large.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};

use super::{
    frames::{Frames, PREFACE},
    pong::{self, Pong},
    socket::Socket,
};

/// What one read takes at most. Bytes.
const INPUT: usize = 64 << 10;
/// How much is collected before it is written without waiting for the end of the round. Bytes.
const OUTPUT: usize = 64 << 10;

/// The socket as h2 sees it. What h2 writes leaves at [`Tap::poll_flush`].
#[derive(Debug)]
pub struct Wire(Arc<Mutex<Inner>>);

/// The socket as the connection's driver sees it.
#[derive(Debug)]
pub struct Tap(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    socket: Socket,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    output: BytesMut,
    pong: Pong,
    frames: Frames,
    /// Whether h2 waits for room in `output`.
    waits_for_room: bool,
    /// Whether a driver flushes; until then h2's own flushes count.
    driven: bool,
}

fn wire(stream: UnixStream, skip: usize) -> io::Result<(Wire, Tap)> {
    let inner = Inner {
        socket: Socket::new(stream)?,
        input: vec![0; INPUT].into_boxed_slice(),
        start: 0,
        end: 0,
        output: BytesMut::with_capacity(OUTPUT),
        pong: Pong::default(),
        frames: Frames::after(skip),
        waits_for_room: false,
        driven: false,
    };
    let inner = Arc::new(Mutex::new(inner));
    Ok((Wire(inner.clone()), Tap(inner)))
}

impl Wire {
    /// The end of a socket that a client opened to us.
    pub fn of_server(stream: UnixStream) -> io::Result<(Self, Tap)> {
        wire(stream, PREFACE)
    }

    /// The end of a socket that we opened to a server.
    pub fn of_client(stream: UnixStream) -> io::Result<(Self, Tap)> {
        wire(stream, 0)
    }
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tap {
    /// From now on the caller flushes, at the end of each round of polls.
    pub fn drive(&self) {
        lock(&self.0).driven = true;
    }

    /// Writes what was collected. If that is nothing but the answer to a PING, it may wait a moment for company.
    pub fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *lock(&self.0);
        if inner.pong.poll_may_wait(cx, pong::is_alone(&inner.output)) {
            return Poll::Pending;
        }
        ready!(inner.poll_drain(cx))?;
        if std::mem::take(&mut inner.waits_for_room) {
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    /// How many frames the peer has sent whole; a client's preface counts as one.
    pub fn frames(&self) -> u64 {
        lock(&self.0).frames.ended()
    }

    /// Whether the peer stopped between frames, where it may stay as long as it likes.
    pub fn is_between_frames(&self) -> bool {
        lock(&self.0).frames.is_between()
    }
}

impl Inner {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            let written = ready!(self.socket.poll_send(cx, &self.output))?;
            self.output.advance(written);
        }
        self.socket.all_sent();
        // With nothing left in it, the buffer's whole room can be had again without allocation.
        self.output.clear();
        Poll::Ready(Ok(()))
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let room = if self.output.len() < OUTPUT { Poll::Ready(Ok(())) } else { self.poll_drain(cx) };
        self.waits_for_room = room.is_pending();
        room
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *lock(&self.0);
        if inner.start == inner.end {
            let length = ready!(inner.socket.poll_recv(cx, &mut inner.input))?;
            inner.frames.push(&inner.input[..length]);
            (inner.start, inner.end) = (0, length);
        }
        let length = buf.remaining().min(inner.end - inner.start);
        buf.put_slice(&inner.input[inner.start..inner.start + length]);
        inner.start += length;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let inner = &mut *lock(&self.0);
        ready!(inner.poll_room(cx))?;
        inner.output.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let inner = &mut *lock(&self.0);
        ready!(inner.poll_room(cx))?;
        for buf in bufs {
            inner.output.extend_from_slice(buf);
        }
        Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *lock(&self.0);
        if inner.driven { Poll::Ready(Ok(())) } else { inner.poll_drain(cx) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *lock(&self.0);
        ready!(inner.poll_drain(cx))?;
        Poll::Ready(inner.socket.shutdown())
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn what_is_written_leaves_together_when_the_driver_flushes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut wire, tap) = Wire::of_client(ours).unwrap();
        tap.drive();
        wire.write_all(b"one ").await.unwrap();
        wire.flush().await.unwrap();
        wire.write_all(b"two").await.unwrap();
        assert_eq!(theirs.try_read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        poll_fn(|cx| tap.poll_flush(cx)).await.unwrap();
        let mut read = [0; 7];
        theirs.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"one two");
    }

    #[tokio::test]
    async fn the_answer_to_a_ping_leaves_with_what_comes_next_or_by_itself() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut wire, tap) = Wire::of_client(ours).unwrap();
        tap.drive();
        let answer: Vec<u8> = (0..17).map(|at| pong::HEAD.get(at).copied().unwrap_or(7)).collect();
        // The clock of this test stands still until it is waited on, with nothing else to do.
        tokio::time::pause();
        wire.write_all(&answer).await.unwrap();
        let flushed = poll_fn(|cx| Poll::Ready(tap.poll_flush(cx))).await;
        assert!(flushed.is_pending());
        assert_eq!(theirs.try_read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        wire.write_all(b"more").await.unwrap();
        poll_fn(|cx| tap.poll_flush(cx)).await.unwrap();
        let mut read = [0; 21];
        theirs.read_exact(&mut read).await.unwrap();
        assert_eq!(read, *[&answer[..], b"more"].concat());

        wire.write_all(&answer).await.unwrap();
        poll_fn(|cx| tap.poll_flush(cx)).await.unwrap();
        theirs.read_exact(&mut read[..17]).await.unwrap();
        assert_eq!(read[..17], answer);
    }

    #[tokio::test]
    async fn much_goes_both_ways_through_small_buffers() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (wire, tap) = Wire::of_client(ours).unwrap();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
        let (mut read, mut write) = tokio::io::split(wire);
        let (mut their_read, mut their_write) = theirs.into_split();
        let echo = async {
            tokio::io::copy(&mut their_read, &mut their_write).await.unwrap();
        };
        let write = async {
            write.write_all(&sent).await.unwrap();
            poll_fn(|cx| tap.poll_flush(cx)).await.unwrap();
        };
        let mut received = vec![0; sent.len()];
        let read = async {
            for part in received.chunks_mut(1000) {
                read.read_exact(part).await.unwrap();
            }
        };
        tokio::select! {
            () = echo => panic!("the echo ended"),
            ((), ()) = async { tokio::join!(write, read) } => {}
        }
        assert!(received == sent);
    }
}
