//! Connection of a client: its request is forwarded to a cell, and bytes are spliced.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, stream::BoxStream};
use kiyot_proto::cell::TunnelPart;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::mpsc,
    time::timeout,
};

use super::{
    body::BodyRest,
    head::{self, HeadError, RequestHead},
    tokens::Tokens,
};
use crate::backends::milpa::failure::Failure;

/// Deadline for a client to send the head of its request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Deadline for a cell's response; one that switches protocols is sent at once.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

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
    Client(#[from] std::io::Error),
    /// The tunnel to the cell failed.
    #[error("the tunnel to the cell")]
    Tunnel(#[from] Failure),
    /// The head is not HTTP.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// A deadline passed.
    #[error("{0} was not received in time")]
    TimedOut(&'static str),
    /// The sender ended early.
    #[error("{0} ended before it was whole")]
    Truncated(&'static str),
    /// The token is not valid.
    #[error("the token is unknown, was used, or has expired")]
    InvalidToken,
}

/// Serves a connection to its end.
pub(super) async fn serve(mut socket: TcpStream, tokens: &Tokens) -> Result<(), StreamError> {
    // Keystrokes of an exec are sent at once.
    socket.set_nodelay(true)?;
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
    let (read, write) = socket.split();
    let (up, down) = (copy_up(read, up), copy_down(inbound, write, request.method == "HEAD"));
    tokio::pin!(up, down);
    tokio::select! {
        ended = &mut down => ended,
        ended = &mut up => {
            ended?;
            down.await
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
async fn refuse(socket: &mut TcpStream, error: StreamError) -> Result<(), StreamError> {
    let (status, reason) = match &error {
        StreamError::Client(_) | StreamError::Truncated(_) => return Err(error),
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
async fn copy_up(mut read: ReadHalf<'_>, up: mpsc::Sender<TunnelPart>) -> Result<(), StreamError> {
    loop {
        // A buffer for each part, so that an idle stream holds one part at most.
        let mut buffer = BytesMut::with_capacity(MAX_PART_BYTES);
        let end = read.read_buf(&mut buffer).await? == 0;
        let sent =
            up.send(TunnelPart { content: buffer.freeze(), end, ..TunnelPart::default() }).await;
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
        if part.end {
            write.shutdown().await?;
        }
    }
    Ok(())
}

/// Forwards a response and returns its status. After 101, bytes behind the head are forwarded too.
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

/// Forwards the body of a response that begins with the received bytes `received`.
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
