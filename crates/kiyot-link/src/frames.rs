//! Length-delimited messages over a byte stream that is mostly idle. An idle stream has no buffer.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

/// The bytes of a message's length prefix.
const PREFIX_BYTES: usize = size_of::<u32>();
/// The most bytes of one read, on the stack.
const MAX_READ_BYTES: usize = 4 * 1024;

/// A byte stream of length-delimited messages.
#[derive(Debug)]
pub struct Frames<I> {
    io: I,
    /// Bytes that were read beyond the last whole message.
    buffer: BytesMut,
    max_message_bytes: usize,
}

impl<I: AsyncRead + AsyncWrite + Unpin> Frames<I> {
    /// Wraps a byte stream whose messages have at most `max_message_bytes`, in either direction.
    pub fn new(io: I, max_message_bytes: usize) -> Self {
        Self { io, buffer: BytesMut::new(), max_message_bytes }
    }

    /// Changes the limit for the messages from now on.
    pub fn set_max_message_bytes(&mut self, max_message_bytes: usize) {
        self.max_message_bytes = max_message_bytes;
    }

    /// Returns the next message, or `None` if the stream has ended between two messages.
    /// Cancel-safe.
    ///
    /// Fails with InvalidData for a message above the limit, and with UnexpectedEof if the stream
    /// ends within a message.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(Some(message));
            }
            if poll_fn(|context| self.poll_read(context)).await? == 0 {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// Sends a message. Not cancel-safe: a message that is cut off leaves the stream unusable.
    pub async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length =
            u32::try_from(message.len()).ok().filter(|_| message.len() <= self.max_message_bytes);
        let length = length.ok_or_else(|| too_long(message.len(), self.max_message_bytes))?;
        // A single write: each write is a TLS record.
        let mut framed = Vec::with_capacity(PREFIX_BYTES + message.len());
        framed.extend_from_slice(&length.to_be_bytes());
        framed.extend_from_slice(message);
        self.io.write_all(&framed).await?;
        self.io.flush().await
    }

    /// Takes the first message from the buffer if it is complete.
    fn take_message(&mut self) -> io::Result<Option<Bytes>> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*prefix)).unwrap_or(usize::MAX);
        if length > self.max_message_bytes {
            return Err(too_long(length, self.max_message_bytes));
        }
        if self.buffer.len() - PREFIX_BYTES < length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_BYTES);
        if self.buffer.len() == length {
            // The buffer's allocation is freed with its last message.
            return Ok(Some(std::mem::take(&mut self.buffer).freeze()));
        }
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = [0; MAX_READ_BYTES];
        let mut read = ReadBuf::new(&mut space);
        ready!(Pin::new(&mut self.io).poll_read(context, &mut read))?;
        self.buffer.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    }
}

fn too_long(length: usize, max_message_bytes: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("message of {length} bytes: at most {max_message_bytes} are allowed"),
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn messages_are_received_whole_however_the_bytes_are_split() {
        let messages: [&[u8]; 4] = [b"first", b"", &[7; 3000], b"last"];
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
                assert_eq!(far.buffer.capacity(), 0, "an idle stream has no buffer");
            };
            tokio::join!(sending, receiving);
        }
    }

    #[tokio::test]
    async fn cancelled_read_loses_no_bytes() {
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 4, b'h', b'a']).await.unwrap();
        assert!(poll_once(far.next()).is_none());
        near.write_all(b"lf").await.unwrap();
        assert_eq!(far.next().await.unwrap().as_deref(), Some(&b"half"[..]));
    }

    #[tokio::test]
    async fn message_above_the_limit_or_cut_off_is_an_error() {
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 101]).await.unwrap();
        assert_eq!(far.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(far.send(&[0; 101]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        far.set_max_message_bytes(50);
        assert_eq!(far.send(&[0; 51]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (mut near, far) = duplex(64);
        let mut far = Frames::new(far, 100);
        near.write_all(&[0, 0, 0, 100, 1]).await.unwrap();
        drop(near);
        assert_eq!(far.next().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        match future.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }
}
