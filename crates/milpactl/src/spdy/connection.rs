//! A connection over TCP.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    time::{MissedTickBehavior, interval_at, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    decode::{Decoder, Frame},
    encode::{self, Encoder},
    upgrade::{MAX_REFUSAL_BYTES, Target, UpgradeError, response},
};

/// Frames that wait to be written; each has at most `MAX_DATA_BYTES` or short headers.
const MAX_QUEUED_FRAMES: usize = 8;
/// Bytes of a read.
const READ_BYTES: usize = 32 << 10;
/// Limit on the connection and the server's answer. A daemon calls the cell for it.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause between pings, far below the four hours after which a server closes an idle connection.
const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The connection has ended. The receiver has the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub struct Closed;

impl From<Closed> for io::Error {
    fn from(closed: Closed) -> Self {
        Self::new(io::ErrorKind::BrokenPipe, closed)
    }
}

/// Connects to a streaming URL of CRI with a protocol such as `v4.channel.k8s.io` or
/// `portforward.k8s.io`.
///
/// # Errors
/// The server can't be reached or refuses.
pub async fn connect(target: &Target, protocol: &str) -> Result<(Sender, Receiver), UpgradeError> {
    let upgraded = timeout(UPGRADE_TIMEOUT, upgrade(target, protocol)).await;
    let timed_out = |_| UpgradeError::TimedOut(UPGRADE_TIMEOUT.as_secs());
    let (stream, buffer) = upgraded.map_err(timed_out)??;
    let (reader, writer) = stream.into_split();
    let (queue, frames) = mpsc::channel(MAX_QUEUED_FRAMES);
    let (pongs, asked) = mpsc::channel(MAX_QUEUED_FRAMES);
    let writing = AbortOnDropHandle::new(tokio::spawn(write(writer, frames, asked)));
    let encoder = Arc::new(Mutex::new(Encoder::default()));
    let receiver =
        Receiver { reader, buffer, decoder: Decoder::default(), pongs, _writing: writing };
    Ok((Sender { encoder, queue }, receiver))
}

/// Returns the connection, and the bytes that were read after the head.
async fn upgrade(target: &Target, protocol: &str) -> Result<(TcpStream, BytesMut), UpgradeError> {
    let mut stream = TcpStream::connect(target.address).await?;
    // Keystrokes are sent at once.
    stream.set_nodelay(true)?;
    stream.write_all(target.request(protocol).as_bytes()).await?;
    let mut buffer = BytesMut::with_capacity(READ_BYTES);
    let head = loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if let Some(head) = response(&buffer)? {
            break head;
        }
    };
    buffer.advance(head.length);
    if head.status != 101 {
        let wanted = head.body_bytes.unwrap_or(MAX_REFUSAL_BYTES).min(MAX_REFUSAL_BYTES);
        while buffer.len() < wanted && stream.read_buf(&mut buffer).await? > 0 {}
        let body = String::from_utf8_lossy(&buffer[..buffer.len().min(wanted)]);
        let body = if body.trim().is_empty() { head.reason } else { body.trim().to_owned() };
        return Err(UpgradeError::Refused { status: head.status, body });
    }
    if head.protocol != protocol {
        let wanted = protocol.to_owned();
        return Err(UpgradeError::Protocol { wanted, chosen: head.protocol });
    }
    Ok((stream, buffer))
}

/// Writes frames, answers to pings, and pings, until the senders are dropped or a write fails.
async fn write(
    mut writer: OwnedWriteHalf,
    mut frames: mpsc::Receiver<Bytes>,
    mut asked: mpsc::Receiver<u32>,
) {
    let mut pings = interval_at(tokio::time::Instant::now() + PING_INTERVAL, PING_INTERVAL);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Pings of a client have odd numbers.
    let mut number = 1u32;
    loop {
        let frame = tokio::select! {
            frame = frames.recv() => frame,
            Some(id) = asked.recv() => Some(encode::ping(id)),
            _ = pings.tick() => {
                number = number.wrapping_add(2);
                Some(encode::ping(number))
            }
        };
        let Some(frame) = frame else { break };
        // The receiver meets the same failure.
        if writer.write_all(&frame).await.is_err() {
            return;
        }
    }
    // The server sees the end when both halves are closed. Dropping the receiver closes the other
    // half.
    let _ = writer.shutdown().await;
}

/// The sending half of a connection. Waits while the server takes nothing.
#[derive(Debug, Clone)]
pub struct Sender {
    encoder: Arc<Mutex<Encoder>>,
    queue: mpsc::Sender<Bytes>,
}

impl Sender {
    /// Opens a stream with headers such as `streamtype`, and returns its id. With `end`, closes our
    /// half at once.
    ///
    /// # Errors
    /// The connection has ended, the headers are too long, or no id is left.
    pub async fn open(&self, headers: &[(&str, &str)], end: bool) -> io::Result<u32> {
        self.open_with(headers, end, |_| ()).await
    }

    /// Opens a stream as [`Sender::open`] does, and calls a function with its id before the server
    /// can send on it.
    ///
    /// # Errors
    /// The connection has ended, the headers are too long, or no id is left.
    pub async fn open_with(
        &self,
        headers: &[(&str, &str)],
        end: bool,
        register: impl FnOnce(u32),
    ) -> io::Result<u32> {
        let permit = self.queue.reserve().await.map_err(|_| Closed)?;
        // Locked until the frame is queued: frames that open streams keep their order.
        let mut encoder = self.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        let (stream, frame) = encoder.open(headers, end).map_err(io::Error::other)?;
        register(stream);
        permit.send(frame);
        Ok(stream)
    }

    /// Sends data on a stream.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn send(&self, stream: u32, mut bytes: Bytes) -> Result<(), Closed> {
        while !bytes.is_empty() {
            self.queue(encode::data(stream, &mut bytes, false)).await?;
        }
        Ok(())
    }

    /// Half-closes a stream.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn end(&self, stream: u32) -> Result<(), Closed> {
        self.queue(encode::data(stream, &mut Bytes::new(), true)).await
    }

    /// Closes both halves of a stream.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn reset(&self, stream: u32) -> Result<(), Closed> {
        self.queue(encode::reset(stream)).await
    }

    async fn queue(&self, frame: Bytes) -> Result<(), Closed> {
        self.queue.send(frame).await.map_err(|_| Closed)
    }
}

/// The receiving half of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Receiver {
    reader: OwnedReadHalf,
    buffer: BytesMut,
    decoder: Decoder,
    pongs: mpsc::Sender<u32>,
    _writing: AbortOnDropHandle<()>,
}

impl Receiver {
    /// Returns the next frame, and answers pings; `None` at the end of the connection.
    ///
    /// Cancel safe: a read that is dropped has consumed nothing.
    ///
    /// # Errors
    /// The connection's error, or a violation of the protocol.
    pub async fn next(&mut self) -> io::Result<Option<Frame>> {
        loop {
            let decoded = self.decoder.next(&mut self.buffer);
            match decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
                // An answer to a ping of ours has an odd number. If a server does not read the
                // answers to its pings in time, some answers are dropped.
                Some(Frame::Ping(id)) if id.is_multiple_of(2) => drop(self.pongs.try_send(id)),
                Some(Frame::Ping(_)) => {}
                Some(frame) => return Ok(Some(frame)),
                None => {
                    self.buffer.reserve(READ_BYTES);
                    if self.reader.read_buf(&mut self.buffer).await? == 0 {
                        return Ok(None);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
