//! Messages on a connection that mostly rests: each behind its length. Between messages nothing is
//! held in memory.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

/// Bytes of a message's length.
const HEAD: usize = size_of::<u32>();
/// The most that one read takes. Bytes, on the stack.
const READ: usize = 4 * 1024;

/// Messages over a byte stream.
#[derive(Debug)]
pub struct Frames<I> {
    io: I,
    /// What was read and is no whole message yet.
    heard: BytesMut,
    longest: usize,
}

impl<I: AsyncRead + AsyncWrite + Unpin> Frames<I> {
    /// No message may be longer than `longest`, in bytes.
    pub fn new(io: I, longest: usize) -> Self {
        Self { io, heard: BytesMut::new(), longest }
    }

    /// From now on no message may be longer than this, in bytes.
    pub fn allow(&mut self, longest: usize) {
        self.longest = longest;
    }

    /// The next message; `None` when the other side has ended between two of them. Given up before
    /// its end, it loses nothing.
    ///
    /// InvalidData for a message that is too long, UnexpectedEof for half a one.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(message) = self.whole()? {
                return Ok(Some(message));
            }
            if poll_fn(|context| self.poll_read(context)).await? == 0 {
                return if self.heard.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// Sends a message. Given up before its end, it leaves the connection of no use.
    pub async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length = u32::try_from(message.len()).ok().filter(|_| message.len() <= self.longest);
        let length = length.ok_or_else(|| too_long(message.len(), self.longest))?;
        // In one piece: each write would be a record of TLS.
        let mut framed = Vec::with_capacity(HEAD + message.len());
        framed.extend_from_slice(&length.to_be_bytes());
        framed.extend_from_slice(message);
        self.io.write_all(&framed).await?;
        self.io.flush().await
    }

    /// The first message, if all of it is there.
    fn whole(&mut self) -> io::Result<Option<Bytes>> {
        let Some(head) = self.heard.first_chunk::<HEAD>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*head)).unwrap_or(usize::MAX);
        if length > self.longest {
            return Err(too_long(length, self.longest));
        }
        if self.heard.len() - HEAD < length {
            return Ok(None);
        }
        self.heard.advance(HEAD);
        if self.heard.len() == length {
            // The buffer leaves with its last message.
            return Ok(Some(std::mem::take(&mut self.heard).freeze()));
        }
        Ok(Some(self.heard.split_to(length).freeze()))
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = [0; READ];
        let mut read = ReadBuf::new(&mut room);
        ready!(Pin::new(&mut self.io).poll_read(context, &mut read))?;
        self.heard.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    }
}

fn too_long(length: usize, longest: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a message of {length} bytes, where {longest} are allowed"),
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn messages_come_as_they_were_sent_however_the_bytes_come() {
        let messages: [&[u8]; 4] = [b"one", b"", &[7; 3000], b"last"];
        for width in [1, 2, 5, 64, 10_000] {
            let (near, far) = duplex(width);
            let (mut near, mut far) = (Frames::new(near, 3000), Frames::new(far, 3000));
            let sending = async {
                for message in messages {
                    near.send(message).await.unwrap();
                }
                drop(near);
            };
            let receiving = async {
                for message in messages {
                    assert_eq!(far.next().await.unwrap().as_deref(), Some(message));
                }
                assert_eq!(far.next().await.unwrap(), None);
                assert_eq!(far.heard.capacity(), 0, "nothing is held at rest");
            };
            tokio::join!(sending, receiving);
        }
    }

    #[tokio::test]
    async fn what_is_given_up_goes_on_later() {
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 4, b'h', b'a']).await.unwrap();
        assert!(futures_now(far.next()).is_none());
        near.write_all(b"lf").await.unwrap();
        assert_eq!(far.next().await.unwrap().as_deref(), Some(&b"half"[..]));
    }

    #[tokio::test]
    async fn what_is_too_long_or_cut_is_an_error() {
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 101]).await.unwrap();
        assert_eq!(far.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(far.send(&[0; 101]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        far.allow(50);
        assert_eq!(far.send(&[0; 51]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 100, 1]).await.unwrap();
        drop(near);
        assert_eq!(far.next().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    fn futures_now<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        match future.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }
}
