//! Connections over a single SPDY connection, with two streams each: `error` and `data`.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, stderr},
    net::TcpStream,
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, error::SendTimeoutError},
        oneshot,
    },
    time::timeout,
};

use crate::{
    output::plain,
    spdy::{Frame, Receiver, Sender},
};

/// Most connections at a time; further connections wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// Parts of data that wait for a local reader.
const MAX_QUEUED_PARTS: usize = 8;
/// Time for a local reader to take a part. All other readers wait, because CRI's SPDY has no
/// windows.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a read.
const READ_BYTES: usize = 32 << 10;
/// Time for the local end of a connection after the other end has closed.
const LINGER: Duration = Duration::from_secs(1);
/// Time for the message of a connection that has ended.
const ERROR_TIMEOUT: Duration = Duration::from_secs(2);
/// Bounds the message of a connection.
const MAX_ERROR_BYTES: usize = 4 << 10;

/// Parts of data of a stream; the channel closes at its end.
type Parts = mpsc::Receiver<Bytes>;

/// Connections of a pod.
#[derive(Debug, Clone)]
pub(super) struct Forwarder {
    sender: Sender,
    streams: Arc<Streams>,
    room: Arc<Semaphore>,
    number: Arc<AtomicU64>,
}

/// The open streams.
#[derive(Debug, Default)]
struct Streams(Mutex<BTreeMap<u32, Entry>>);

#[derive(Debug)]
struct Entry {
    to: mpsc::Sender<Bytes>,
    stalled: oneshot::Sender<()>,
}

impl Streams {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<u32, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, stream: u32) -> Option<Entry> {
        self.entries().remove(&stream)
    }
}

/// A stream. Dropping it removes it.
#[derive(Debug)]
struct Stream {
    id: u32,
    parts: Parts,
    /// Completes if the parts were not taken in time.
    stalled: oneshot::Receiver<()>,
    streams: Arc<Streams>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.streams.remove(self.id);
    }
}

impl Forwarder {
    /// Returns a forwarder over a connection.
    pub(super) fn new(sender: Sender) -> Self {
        Self {
            sender,
            streams: Arc::default(),
            room: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            number: Arc::default(),
        }
    }

    /// Waits for room for a connection.
    pub(super) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.room).acquire_owned().await.ok()
    }

    /// Passes received data on to the connections until the connection to the pod ends.
    pub(super) async fn dispatch(&self, mut receiver: Receiver) {
        while let Ok(Some(frame)) = receiver.next().await {
            let ended = match frame {
                Frame::Data { stream, bytes, end } => {
                    self.pass(stream, bytes).await;
                    end.then_some(stream)
                }
                Frame::Headers { stream, end } => end.then_some(stream),
                Frame::Reset { stream, .. } => Some(stream),
                Frame::Ping(_) | Frame::GoAway => None,
            };
            if let Some(stream) = ended {
                self.streams.remove(stream);
            }
        }
    }

    /// Passes data on to a stream. Data of ended streams is dropped.
    async fn pass(&self, stream: u32, bytes: Bytes) {
        let to = self.streams.entries().get(&stream).map(|entry| entry.to.clone());
        let Some(to) = to.filter(|_| !bytes.is_empty()) else { return };
        if let Err(SendTimeoutError::Timeout(_)) = to.send_timeout(bytes, STALL_TIMEOUT).await
            && let Some(entry) = self.streams.remove(stream)
        {
            // The connection's own task resets the stream, because a reset waits for the server,
            // which may wait for this task.
            let _ = entry.stalled.send(());
        }
    }

    /// Forwards a connection to a port of the pod until both ends are closed.
    pub(super) async fn forward(&self, mut local: TcpStream, remote: u16) -> io::Result<()> {
        local.set_nodelay(true)?;
        let (port, number) = (remote.to_string(), self.number.fetch_add(1, Ordering::Relaxed));
        let number = number.to_string();
        let mut error = self.open("error", &port, &number, true).await?;
        let mut data = self.open("data", &port, &number, false).await?;
        let Stream { id, parts, stalled, .. } = &mut data;
        let copied = tokio::select! {
            copied = self.copy(&mut local, *id, parts) => copied,
            Ok(()) = stalled => {
                let seconds = STALL_TIMEOUT.as_secs();
                Err(io::Error::other(format!("the local end took nothing for {seconds} s")))
            }
        };
        let message = timeout(ERROR_TIMEOUT, message(&mut error.parts)).await.unwrap_or_default();
        // The server may not know yet that the connection ends.
        for stream in [&data, &error] {
            let _ = self.sender.reset(stream.id).await;
        }
        if message.is_empty() { copied } else { Err(io::Error::other(message)) }
    }

    async fn open(&self, kind: &str, port: &str, number: &str, end: bool) -> io::Result<Stream> {
        let headers = [("streamtype", kind), ("port", port), ("requestid", number)];
        let (to, parts) = mpsc::channel(MAX_QUEUED_PARTS);
        let (stalls, stalled) = oneshot::channel();
        let streams = Arc::clone(&self.streams);
        let register = |id| drop(streams.entries().insert(id, Entry { to, stalled: stalls }));
        let id = self.sender.open_with(&headers, end, register).await?;
        Ok(Stream { id, parts, stalled, streams })
    }

    /// Copies both ways until the pod's end is closed, and then until the local end is closed, for
    /// at most `LINGER`.
    async fn copy(&self, local: &mut TcpStream, id: u32, data: &mut Parts) -> io::Result<()> {
        let (mut read, mut write) = local.split();
        let up = async {
            let sent = self.send(&mut read, id).await;
            // The end of a half, or of both.
            match &sent {
                Ok(()) => self.sender.end(id).await?,
                Err(_) => self.sender.reset(id).await?,
            }
            sent
        };
        let down = async {
            while let Some(part) = data.recv().await {
                write.write_all(&part).await?;
            }
            write.shutdown().await
        };
        tokio::pin!(up, down);
        tokio::select! {
            ended = &mut up => {
                ended?;
                down.await
            }
            ended = &mut down => {
                ended?;
                // Closing the local end with unread data would discard what was sent to it.
                timeout(LINGER, up).await.unwrap_or(Ok(()))
            }
        }
    }

    /// Sends the data of the local end until its end.
    async fn send(&self, read: &mut (impl AsyncRead + Unpin), stream: u32) -> io::Result<()> {
        loop {
            // A buffer for each part, so that an idle connection holds one at most.
            let mut buffer = BytesMut::with_capacity(READ_BYTES);
            if read.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            self.sender.send(stream, buffer.freeze()).await?;
        }
    }
}

/// Returns the message of a connection at the end of its error stream.
async fn message(parts: &mut Parts) -> String {
    let mut message = Vec::new();
    while let Some(part) = parts.recv().await {
        let room = MAX_ERROR_BYTES - message.len();
        message.extend_from_slice(&part[..part.len().min(room)]);
    }
    String::from_utf8_lossy(&message).into_owned()
}

/// Writes the failure of a connection. A standard error that is not read delays no other
/// connection.
pub(super) async fn report(remote: u16, error: &str) {
    let line = format!("milpactl: connection to port {remote}: {}\n", plain(error));
    let mut stderr = stderr();
    let _ = stderr.write_all(line.as_bytes()).await;
    let _ = stderr.flush().await;
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::spdy::{Target, connect};

    #[tokio::test]
    async fn stalled_reader_is_dropped_and_other_readers_continue() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = Target { address: listener.local_addr().unwrap(), path: "/".to_owned() };
        let server = tokio::spawn(async move {
            let mut server = listener.accept().await.unwrap().0;
            let answer = b"HTTP/1.1 101 S\r\nX-Stream-Protocol-Version: p\r\n\r\n";
            server.write_all(answer).await.unwrap();
            server
        });
        let (sender, _receiver) = connect(&target, "p").await.unwrap();
        let _server = server.await.unwrap();
        let forwarder = Forwarder::new(sender);
        let mut stalled = forwarder.open("data", "80", "0", false).await.unwrap();
        let mut other = forwarder.open("data", "80", "1", false).await.unwrap();
        tokio::time::pause();
        for _ in 0..MAX_QUEUED_PARTS {
            forwarder.pass(stalled.id, "part".into()).await;
        }
        let before = tokio::time::Instant::now();
        assert!(stalled.stalled.try_recv().is_err());
        forwarder.pass(stalled.id, "too much".into()).await;
        assert_eq!(before.elapsed().as_secs(), STALL_TIMEOUT.as_secs());
        assert_eq!(stalled.stalled.try_recv(), Ok(()));
        forwarder.pass(stalled.id, "dropped".into()).await;
        forwarder.pass(other.id, "passed".into()).await;
        assert_eq!(other.parts.recv().await.unwrap(), "passed");
        drop(other);
        assert_eq!(forwarder.streams.entries().len(), 0);
    }
}
