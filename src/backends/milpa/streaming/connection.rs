//! One client's connection: its request is sent on to a cell, and bytes are spliced.

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
use tonic::Status;

use super::{
    answer::Rest,
    head::{self, HeadError, RequestHead},
    tokens::Tokens,
};

/// How long a client has to send the head of its request.
const HEAD_TIME: Duration = Duration::from_secs(5);

/// How long a cell has for its answer; one that switches protocols ends it at once.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Largest part that is sent to a cell.
const PART: usize = 32 << 10;

/// Parts that wait to be sent to a cell.
const QUEUE: usize = 4;

type Inbound = BoxStream<'static, Result<TunnelPart, Status>>;

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// The client's side.
    #[error("the client's connection")]
    Client(#[from] std::io::Error),
    /// The cell's side.
    #[error("the tunnel to the cell")]
    Tunnel(#[from] Status),
    /// What was sent is not HTTP.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// Nothing, or not all, came in time.
    #[error("{0} did not come in time")]
    Slow(&'static str),
    /// The other side has ended.
    #[error("{0} ended before it was whole")]
    Short(&'static str),
    /// The token leads nowhere.
    #[error("the token is unknown, was used, or has expired")]
    Token,
}

/// Serves one connection to its end.
pub(super) async fn serve(mut socket: TcpStream, tokens: &Tokens) -> Result<(), StreamError> {
    // Keystrokes of an exec must not wait for more.
    socket.set_nodelay(true)?;
    let served = timeout(HEAD_TIME, request(&mut socket))
        .await
        .unwrap_or(Err(StreamError::Slow("the request's head")));
    let (request, bytes) = match served {
        Ok(request) => request,
        Err(error) => return refuse(&mut socket, error).await,
    };
    let Some(way) = request.token().and_then(|token| tokens.take(token)) else {
        return refuse(&mut socket, StreamError::Token).await;
    };
    let (up, parts) = mpsc::channel(QUEUE);
    let mut first = Bytes::from(request.retargeted(&bytes, &way.target));
    let mut port = u32::from(way.port);
    let opening = async {
        // The head may be larger than the queue has room for, so it is sent while the tunnel is
        // opened.
        while !first.is_empty() {
            let content = first.split_to(first.len().min(PART));
            // A failure is seen by the opening of the tunnel, which has the receiver.
            let _ = up
                .send(TunnelPart {
                    content,
                    port: std::mem::take(&mut port),
                    ..TunnelPart::default()
                })
                .await;
        }
    };
    let (inbound, ()) = tokio::join!(way.tunnels.open(parts), opening);
    let inbound = match inbound {
        Ok(inbound) => inbound,
        Err(status) => return refuse(&mut socket, status.into()).await,
    };
    let (read, write) = socket.split();
    let (up, down) = (send_up(read, up), bring_down(inbound, write, request.method == "HEAD"));
    tokio::pin!(up, down);
    tokio::select! {
        ended = &mut down => ended,
        ended = &mut up => {
            ended?;
            down.await
        }
    }
}

/// Reads the head of a request, and what comes with it.
async fn request(socket: &mut TcpStream) -> Result<(RequestHead, BytesMut), StreamError> {
    let mut bytes = BytesMut::with_capacity(4 << 10);
    loop {
        let seen = bytes.len();
        if socket.read_buf(&mut bytes).await? == 0 {
            return Err(StreamError::Short("the request's head"));
        }
        if let Some(head) = head::request(&bytes, seen)? {
            return Ok((head, bytes));
        }
    }
}

/// Answers a request that doesn't reach a cell.
async fn refuse(socket: &mut TcpStream, error: StreamError) -> Result<(), StreamError> {
    let (status, why) = match &error {
        StreamError::Client(_) | StreamError::Short(_) => return Err(error),
        StreamError::Token => ("404 Not Found", error.to_string()),
        StreamError::Slow(_) => ("408 Request Timeout", error.to_string()),
        StreamError::Head(HeadError::TooLong) => {
            ("431 Request Header Fields Too Large", error.to_string())
        }
        StreamError::Head(_) => ("400 Bad Request", error.to_string()),
        StreamError::Tunnel(status) => {
            ("502 Bad Gateway", format!("{error}: {}", status.message()))
        }
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{why}",
        why.len()
    );
    timeout(HEAD_TIME, socket.write_all(answer.as_bytes())).await.unwrap_or(Ok(()))?;
    socket.shutdown().await?;
    Err(error)
}

/// Takes what the client sends to the cell, until the client sends no more.
async fn send_up(mut read: ReadHalf<'_>, up: mpsc::Sender<TunnelPart>) -> Result<(), StreamError> {
    loop {
        // A buffer of its own for each part: an idle stream then holds one part at most.
        let mut buffer = BytesMut::with_capacity(PART);
        let end = read.read_buf(&mut buffer).await? == 0;
        let sent =
            up.send(TunnelPart { content: buffer.freeze(), end, ..TunnelPart::default() }).await;
        if end || sent.is_err() {
            return Ok(());
        }
    }
}

/// Takes what the cell sends to the client: an answer that switches protocols and all that follows,
/// or one other answer.
async fn bring_down(
    mut inbound: Inbound,
    mut write: WriteHalf<'_>,
    no_body: bool,
) -> Result<(), StreamError> {
    let answered = timeout(ANSWER_TIME, answer(&mut inbound, &mut write, no_body))
        .await
        .unwrap_or(Err(StreamError::Slow("the cell's answer")))?;
    if answered != 101 {
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

/// Forwards an answer, and returns its status. With 101, what came behind its head is forwarded
/// too.
async fn answer(
    inbound: &mut Inbound,
    write: &mut WriteHalf<'_>,
    no_body: bool,
) -> Result<u16, StreamError> {
    let mut bytes = BytesMut::new();
    loop {
        let seen = bytes.len();
        let part = next(inbound).await?.ok_or(StreamError::Short("the cell's answer"))?;
        bytes.extend_from_slice(&part);
        // Answers that announce another one (100 Continue) are forwarded like it.
        let mut from = seen;
        while let Some(head) = head::answer(&bytes, from)? {
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
                        body(inbound, write, Rest::new(head.body), &bytes).await?;
                    }
                    return Ok(status);
                }
            }
        }
    }
}

/// Forwards the body of an answer, of which `come` has already come.
async fn body(
    inbound: &mut Inbound,
    write: &mut WriteHalf<'_>,
    mut rest: Rest,
    come: &[u8],
) -> Result<(), StreamError> {
    write.write_all(rest.take(come)).await?;
    while !rest.is_over() {
        let Some(part) = next(inbound).await? else { break };
        write.write_all(rest.take(&part)).await?;
    }
    Ok(())
}

/// The next bytes from a cell; `None` at their end.
async fn next(inbound: &mut Inbound) -> Result<Option<Bytes>, StreamError> {
    Ok(match inbound.next().await.transpose()? {
        Some(part) if part.end && part.content.is_empty() => None,
        Some(part) => Some(part.content),
        None => None,
    })
}
