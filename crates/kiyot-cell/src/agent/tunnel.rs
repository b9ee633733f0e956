//! `Tunnel`: one byte stream to the streaming server of the cell's containerd, or to a connection
//! of the pod's.

use std::net::Ipv4Addr;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, stream::BoxStream};
use kiyot_proto::cell::TunnelPart;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{OwnedSemaphorePermit, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

/// The most that is read of a connection at once, in bytes.
const READ_CHUNK_BYTES: usize = 32 * 1024;
/// Parts that may wait for the link.
const QUEUED_PARTS: usize = 4;

/// What a tunnel leads to: a connection, and what is held as long as it is carried.
pub type Target = (TcpStream, OwnedSemaphorePermit);

/// Connects to the streaming server, if it listens on that port.
pub async fn connect_streaming_server(
    port: u32,
    allowed: u16,
    permit: OwnedSemaphorePermit,
) -> Result<Target, Status> {
    if port != u32::from(allowed) {
        return Err(Status::permission_denied(format!(
            "port {port}: the only one that is tunnelled to is {allowed}, containerd's streaming server"
        )));
    }
    let connection = TcpStream::connect((Ipv4Addr::LOCALHOST, allowed)).await.map_err(|error| {
        Status::unavailable(format!("containerd's streaming server on port {allowed}: {error}"))
    })?;
    Ok((connection, permit))
}

/// Carries bytes both ways until both sides have ended: `first`, and what comes after it.
pub fn relay(
    (connection, permit): Target,
    first: TunnelPart,
    incoming: impl Stream<Item = Result<TunnelPart, Status>> + Send + Unpin + 'static,
) -> BoxStream<'static, Result<TunnelPart, Status>> {
    // What is typed goes out at once.
    let _ = connection.set_nodelay(true);
    let (reader, writer) = connection.into_split();
    let (sender, receiver) = mpsc::channel(QUEUED_PARTS);
    let inward =
        AbortOnDropHandle::new(tokio::spawn(inward(first, incoming, writer, sender.clone())));
    let outward = AbortOnDropHandle::new(tokio::spawn(outward(reader, sender)));
    // The stream owns both directions: they end with it.
    let owned = (inward, outward, permit);
    Box::pin(ReceiverStream::new(receiver).map(move |part| {
        let _ = &owned;
        part
    }))
}

/// From the link to the connection.
async fn inward(
    first: TunnelPart,
    mut incoming: impl Stream<Item = Result<TunnelPart, Status>> + Unpin,
    mut writer: OwnedWriteHalf,
    sender: mpsc::Sender<Result<TunnelPart, Status>>,
) {
    let mut next = Some(Ok(first));
    while let Some(part) = next {
        let part = match part {
            Ok(part) => part,
            Err(status) => {
                // The other side is gone: so is what came from the connection.
                let _ = sender.send(Err(status)).await;
                return;
            }
        };
        if let Err(error) = writer.write_all(&part.content).await {
            // A server that has answered in full may close before it has read all: its answer still
            // goes out.
            tracing::debug!(%error, "a tunnel's end takes no more");
            return;
        }
        if part.end {
            break;
        }
        next = incoming.next().await;
    }
    let _ = writer.shutdown().await;
    // What follows an end is not looked at; the error of a reset ends the stream by itself.
}

/// From the connection to the link.
async fn outward(mut reader: OwnedReadHalf, sender: mpsc::Sender<Result<TunnelPart, Status>>) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(READ_CHUNK_BYTES);
        let part = match reader.read_buf(&mut buffer).await {
            Ok(0) => Ok(TunnelPart { content: Bytes::new(), end: true, ..Default::default() }),
            Ok(_) => Ok(TunnelPart {
                content: buffer.split().freeze(),
                end: false,
                ..Default::default()
            }),
            Err(error) => Err(Status::unavailable(format!("the tunnel's end: {error}"))),
        };
        let last = !matches!(&part, Ok(part) if !part.end);
        if sender.send(part).await.is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::{net::TcpListener, sync::Semaphore};

    use super::*;

    async fn open(
        mut incoming: impl Stream<Item = Result<TunnelPart, Status>> + Send + Unpin + 'static,
        allowed: u16,
        permit: OwnedSemaphorePermit,
    ) -> Result<BoxStream<'static, Result<TunnelPart, Status>>, Status> {
        let first = incoming.next().await.unwrap().unwrap();
        Ok(relay(connect_streaming_server(first.port, allowed, permit).await?, first, incoming))
    }

    fn part(content: &'static [u8], end: bool, port: u16) -> Result<TunnelPart, Status> {
        Ok(TunnelPart { content: content.into(), end, port: port.into(), query: 0 })
    }

    async fn permit() -> OwnedSemaphorePermit {
        Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap()
    }

    #[tokio::test]
    async fn bytes_go_both_ways_and_either_side_ends_alone() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = String::new();
            stream.read_to_string(&mut request).await.unwrap();
            stream.write_all(format!("you said {request}").as_bytes()).await.unwrap();
        });
        let parts = tokio_stream::iter([
            part(b"he", false, port),
            part(b"llo", false, 0),
            part(b"", true, 0),
        ]);
        let answer: Vec<_> =
            open(parts, port, permit().await).await.unwrap().map(Result::unwrap).collect().await;
        server.await.unwrap();
        assert!(answer.last().unwrap().end);
        let bytes: Vec<u8> = answer.into_iter().flat_map(|part| part.content).collect();
        assert_eq!(bytes, b"you said hello");
    }

    #[tokio::test]
    async fn no_other_port_is_reached() {
        let refused = open(tokio_stream::iter([part(b"", false, 22)]), 1000, permit().await)
            .await
            .err()
            .unwrap();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    }

    #[tokio::test]
    async fn the_connection_ends_with_the_stream() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (_open, receiver) = mpsc::channel(1);
        _open.send(part(b"x", false, port)).await.unwrap();
        let tunnel = open(ReceiverStream::new(receiver), port, permit().await).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        drop(tunnel);
        let mut rest = Vec::new();
        tokio::time::timeout(std::time::Duration::from_secs(60), stream.read_to_end(&mut rest))
            .await
            .unwrap()
            .ok();
    }
}
