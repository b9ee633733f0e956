//! `Tunnel`: relays a byte stream to containerd's streaming server, or to a TCP connection of the
//! pod to a name server.

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
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Status;

/// Upper bound on one read, in bytes.
const READ_CHUNK_BYTES: usize = 32 * 1024;
/// Parts buffered for the uplink.
const QUEUED_PARTS: usize = 4;

/// Connection at the end of a tunnel, with the permit that bounds the number of tunnels, and the
/// token that ends the tunnel.
pub type Target = (TcpStream, OwnedSemaphorePermit, CancellationToken);

/// Connects to the streaming server, if `port` is its port.
pub async fn connect_streaming_server(
    port: u32,
    allowed: u16,
    permit: OwnedSemaphorePermit,
) -> Result<Target, Status> {
    if port != u32::from(allowed) {
        return Err(Status::permission_denied(format!(
            "port {port}: not allowed; allowed: {allowed}, containerd's streaming server"
        )));
    }
    let connection = TcpStream::connect((Ipv4Addr::LOCALHOST, allowed)).await.map_err(|error| {
        Status::unavailable(format!("containerd's streaming server on port {allowed}: {error}"))
    })?;
    Ok((connection, permit, CancellationToken::new()))
}

/// Relays bytes in both directions until both sides have ended, or the target's token is
/// cancelled. `first` precedes `incoming`.
pub fn relay(
    (connection, permit, end): Target,
    first: TunnelPart,
    incoming: impl Stream<Item = Result<TunnelPart, Status>> + Send + Unpin + 'static,
) -> BoxStream<'static, Result<TunnelPart, Status>> {
    // Nagle's algorithm would delay the key strokes of an interactive exec.
    let _ = connection.set_nodelay(true);
    let (reader, writer) = connection.into_split();
    let (sender, receiver) = mpsc::channel(QUEUED_PARTS);
    let copy_to_target = AbortOnDropHandle::new(tokio::spawn(copy_to_target(
        first,
        incoming,
        writer,
        sender.clone(),
    )));
    let copy_from_target = AbortOnDropHandle::new(tokio::spawn(copy_from_target(reader, sender)));
    // The stream owns both directions.
    let owned = (copy_to_target, copy_from_target, permit);
    let parts = ReceiverStream::new(receiver).map(move |part| {
        let _ = &owned;
        part
    });
    Box::pin(parts.take_until(end.cancelled_owned()))
}

/// Copies from the uplink to the connection.
async fn copy_to_target(
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
                // The caller has failed: the other direction ends too.
                let _ = sender.send(Err(status)).await;
                return;
            }
        };
        if let Err(error) = writer.write_all(&part.content).await {
            // A server may close after its full response without reading the rest; the response is
            // still sent.
            tracing::debug!(%error, "tunnel target closed for writing");
            return;
        }
        if part.end {
            break;
        }
        next = incoming.next().await;
    }
    let _ = writer.shutdown().await;
    // Further parts are ignored. A reset ends the stream with its error.
}

/// Copies from the connection to the uplink.
async fn copy_from_target(
    mut reader: OwnedReadHalf,
    sender: mpsc::Sender<Result<TunnelPart, Status>>,
) {
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
            Err(error) => Err(Status::unavailable(format!("tunnel target: {error}"))),
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
    async fn tunnel_relays_both_directions_and_half_close() {
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
    async fn tunnel_to_another_port_is_denied() {
        let refused = open(tokio_stream::iter([part(b"", false, 22)]), 1000, permit().await)
            .await
            .err()
            .unwrap();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    }

    #[tokio::test]
    async fn dropped_stream_closes_the_connection() {
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
