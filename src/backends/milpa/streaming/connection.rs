//! Connection of a client: its request is forwarded to a cell, and bytes are spliced.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, stream::BoxStream};
use kiyot_proto::cell::TunnelPart;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepidle};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, timeout},
};

use super::{
    MAX_CELL_STREAMS, MAX_STREAMS,
    body::BodyRest,
    head::{self, HeadError, RequestHead},
    tokens::{Route, Tokens},
};
use crate::backends::milpa::failure::Failure;

/// Deadline for a client to send the head of its request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Deadline for a cell's response. A response that switches protocols is sent at once.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A stream that a side has closed ends after this time without a byte. The kubelet closes both
/// directions at once, so a client that has closed one direction has left if no bytes move.
const ABANDONED_TIMEOUT: Duration = Duration::from_secs(10);

/// Idle time after which the kernel probes the client's connection. Without probes, the end of a
/// client stays unknown while the cell does not read all bytes of the client.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);

/// Largest part that is sent to a cell, in bytes.
const MAX_PART_BYTES: usize = 32 << 10;

/// Most parts that wait to be sent to a cell.
const MAX_QUEUED_PARTS: usize = 4;

type Inbound = BoxStream<'static, Result<TunnelPart, Failure>>;

/// Reason of a connection's early end.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// The client's connection failed.
    #[error("the client's connection")]
    Client(#[from] io::Error),
    /// The tunnel to the cell failed.
    #[error("the tunnel to the cell")]
    Tunnel(#[from] Failure),
    #[error(transparent)]
    Head(#[from] HeadError),
    #[error("{0} was not received in time")]
    TimedOut(&'static str),
    #[error("{0} ended before it was whole")]
    Truncated(&'static str),
    #[error("the token is unknown, was used, or has expired")]
    InvalidToken,
    #[error("{limit} streams of {owner} are open, and no more are allowed")]
    TooManyStreams { limit: usize, owner: &'static str },
    /// A side has closed its direction, and the other sends nothing.
    #[error("no byte was sent for {ABANDONED_TIMEOUT:?} after the end of a side")]
    Abandoned,
}

/// A client whose token was valid.
pub(super) struct Accepted {
    socket: TcpStream,
    request: RequestHead,
    /// The head, and any bytes after it.
    bytes: BytesMut,
    route: Route,
    /// A permit of all streams, and a permit of the cell's streams.
    permits: [OwnedSemaphorePermit; 2],
}

/// Reads the request of a connection. `streams` limits the streams of all cells.
pub(super) async fn accept(
    mut socket: TcpStream,
    tokens: &Tokens,
    streams: &Arc<Semaphore>,
) -> Result<Accepted, StreamError> {
    // Keystrokes of an exec are sent at once.
    socket.set_nodelay(true)?;
    set_socket_keepalive(&socket, true).map_err(io::Error::from)?;
    set_tcp_keepidle(&socket, KEEPALIVE_IDLE).map_err(io::Error::from)?;
    let served = timeout(HEAD_TIMEOUT, request(&mut socket))
        .await
        .unwrap_or(Err(StreamError::TimedOut("the request's head")));
    let (request, bytes) = match served {
        Ok(request) => request,
        Err(error) => return refuse(&mut socket, error).await,
    };
    let Some(route) = request.token().and_then(|token| tokens.take(token)) else {
        return refuse(&mut socket, StreamError::InvalidToken).await;
    };
    let permit = |of: &Arc<Semaphore>, limit, owner| {
        Arc::clone(of).try_acquire_owned().map_err(|_| StreamError::TooManyStreams { limit, owner })
    };
    let of_node = permit(streams, MAX_STREAMS, "the node");
    let of_cell = permit(&route.streams, MAX_CELL_STREAMS, "the cell");
    match (of_node, of_cell) {
        (Ok(of_node), Ok(of_cell)) => {
            Ok(Accepted { socket, request, bytes, route, permits: [of_node, of_cell] })
        }
        (Err(error), _) | (_, Err(error)) => refuse(&mut socket, error).await,
    }
}

/// Serves a stream to its end.
pub(super) async fn serve(accepted: Accepted) -> Result<(), StreamError> {
    let Accepted { mut socket, request, bytes, route, permits: _permits } = accepted;
    let (up, parts) = mpsc::channel(MAX_QUEUED_PARTS);
    let mut first = Bytes::from(request.retargeted(&bytes, &route.target));
    let mut port = u32::from(route.port);
    let opening = async {
        // Sent while the tunnel is opened, because the head may exceed the queue.
        while !first.is_empty() {
            let content = first.split_to(first.len().min(MAX_PART_BYTES));
            // The receiver belongs to the opening of the tunnel, which returns the failure.
            let _ = up
                .send(TunnelPart {
                    content,
                    port: std::mem::take(&mut port),
                    ..TunnelPart::default()
                })
                .await;
        }
    };
    let (inbound, ()) = tokio::join!(route.tunnels.open(parts), opening);
    let inbound = match inbound {
        Ok(inbound) => inbound,
        Err(failure) => return refuse(&mut socket, failure.into()).await,
    };
    let progress = Progress::default();
    let (read, write) = socket.split();
    let up = copy_up(&read, up, &progress);
    let down = copy_down(inbound, write, request.method == "HEAD", &progress);
    tokio::pin!(up, down);
    let copied = async {
        tokio::select! {
            ended = &mut down => ended,
            ended = &mut up => {
                ended?;
                down.await
            }
        }
    };
    tokio::select! {
        ended = copied => ended,
        () = abandoned(read.as_ref(), &progress) => Err(StreamError::Abandoned),
    }
}

#[derive(Debug, Default)]
struct Progress {
    /// Count of parts with bytes, in both directions.
    parts: AtomicU64,
    /// Notified when the cell has ended its direction.
    cell_end: Notify,
}

impl Progress {
    fn count(&self, bytes: usize) {
        if bytes > 0 {
            self.parts.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits until a side has closed its direction, and then until no byte moves. Unread bytes do not
/// hide the client's end.
async fn abandoned(client: &TcpStream, progress: &Progress) {
    tokio::select! {
        // Ready only at the client's end, because the socket is not registered for priority data.
        // `READABLE` would also be ready for unread bytes.
        _ = client.ready(Interest::PRIORITY) => {}
        () = progress.cell_end.notified() => {}
    }
    loop {
        let before = progress.parts.load(Ordering::Relaxed);
        sleep(ABANDONED_TIMEOUT).await;
        if progress.parts.load(Ordering::Relaxed) == before {
            return;
        }
    }
}

/// Reads the head of a request, and any bytes after it.
async fn request(socket: &mut TcpStream) -> Result<(RequestHead, BytesMut), StreamError> {
    let mut bytes = BytesMut::with_capacity(4 << 10);
    loop {
        let seen = bytes.len();
        if socket.read_buf(&mut bytes).await? == 0 {
            return Err(StreamError::Truncated("the request's head"));
        }
        if let Some(head) = head::request(&bytes, seen)? {
            return Ok((head, bytes));
        }
    }
}

/// Responds to a request that doesn't reach a cell.
async fn refuse<T>(socket: &mut TcpStream, error: StreamError) -> Result<T, StreamError> {
    let (status, reason) = match &error {
        StreamError::Client(_) | StreamError::Truncated(_) | StreamError::Abandoned => {
            return Err(error);
        }
        StreamError::TooManyStreams { .. } => ("503 Service Unavailable", error.to_string()),
        StreamError::InvalidToken => ("404 Not Found", error.to_string()),
        StreamError::TimedOut(_) => ("408 Request Timeout", error.to_string()),
        StreamError::Head(HeadError::TooLong) => {
            ("431 Request Header Fields Too Large", error.to_string())
        }
        StreamError::Head(_) => ("400 Bad Request", error.to_string()),
        StreamError::Tunnel(failure) => {
            ("502 Bad Gateway", format!("{error}: {}", failure.message()))
        }
    };
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{reason}",
        reason.len()
    );
    timeout(HEAD_TIMEOUT, socket.write_all(response.as_bytes())).await.unwrap_or(Ok(()))?;
    socket.shutdown().await?;
    Err(error)
}

/// Copies the client's bytes to the cell until the client's end.
async fn copy_up(
    read: &ReadHalf<'_>,
    up: mpsc::Sender<TunnelPart>,
    progress: &Progress,
) -> Result<(), StreamError> {
    loop {
        read.readable().await?;
        // A buffer for each part, so that an idle stream holds no buffer.
        let mut buffer = BytesMut::with_capacity(MAX_PART_BYTES);
        let end = match read.try_read_buf(&mut buffer) {
            Ok(bytes) => bytes == 0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error.into()),
        };
        let bytes = buffer.len();
        let sent =
            up.send(TunnelPart { content: buffer.freeze(), end, ..TunnelPart::default() }).await;
        progress.count(bytes);
        if end || sent.is_err() {
            return Ok(());
        }
    }
}

/// Copies the cell's bytes to the client: a response that switches protocols and all bytes after
/// it, or a single other response.
async fn copy_down(
    mut inbound: Inbound,
    mut write: WriteHalf<'_>,
    no_body: bool,
    progress: &Progress,
) -> Result<(), StreamError> {
    let status = timeout(RESPONSE_TIMEOUT, forward_response(&mut inbound, &mut write, no_body))
        .await
        .unwrap_or(Err(StreamError::TimedOut("the cell's response")))?;
    if status != 101 {
        write.shutdown().await?;
        return Ok(());
    }
    while let Some(part) = inbound.next().await {
        let part = part?;
        write.write_all(&part.content).await?;
        progress.count(part.content.len());
        if part.end {
            write.shutdown().await?;
            progress.cell_end.notify_one();
        }
    }
    Ok(())
}

/// Forwards a response and returns its status. After 101, also forwards the bytes behind the head.
async fn forward_response(
    inbound: &mut Inbound,
    write: &mut WriteHalf<'_>,
    no_body: bool,
) -> Result<u16, StreamError> {
    let mut bytes = BytesMut::new();
    loop {
        let seen = bytes.len();
        let part = next(inbound).await?.ok_or(StreamError::Truncated("the cell's response"))?;
        bytes.extend_from_slice(&part);
        // Interim responses (100 Continue) are forwarded likewise.
        let mut from = seen;
        while let Some(head) = head::response(&bytes, from)? {
            write.write_all(&bytes.split_to(head.length)).await?;
            from = 0;
            match head.status {
                101 => {
                    write.write_all(&bytes).await?;
                    return Ok(101);
                }
                100..200 => {}
                status => {
                    if !no_body {
                        forward_body(inbound, write, BodyRest::new(head.body), &bytes).await?;
                    }
                    return Ok(status);
                }
            }
        }
    }
}

/// Forwards the body of a response. The body begins with the bytes `received`.
async fn forward_body(
    inbound: &mut Inbound,
    write: &mut WriteHalf<'_>,
    mut rest: BodyRest,
    received: &[u8],
) -> Result<(), StreamError> {
    write.write_all(rest.take(received)).await?;
    while !rest.is_complete() {
        let Some(part) = next(inbound).await? else { break };
        write.write_all(rest.take(&part)).await?;
    }
    Ok(())
}

/// Returns the next bytes from a cell; `None` at their end.
async fn next(inbound: &mut Inbound) -> Result<Option<Bytes>, StreamError> {
    Ok(match inbound.next().await.transpose()? {
        Some(part) if part.end && part.content.is_empty() => None,
        Some(part) => Some(part.content),
        None => None,
    })
}
