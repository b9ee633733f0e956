//! Connections of pods to a name server, in the node's network.

use std::io;

use bytes::BytesMut;
use futures::{Stream, StreamExt};
use kiyot_link::resolver::{QUERY_TIMEOUT, TCP_IDLE_TIMEOUT};
use kiyot_proto::cell::TunnelPart;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};

use super::{Server, udp};
use crate::backends::milpa::{cell_client::CellClient, failure::Failure};

/// Most bytes of a read.
const MAX_READ_BYTES: usize = 16 << 10;
/// Most parts that wait for the link.
const MAX_QUEUED_PARTS: usize = 4;

/// Connects to a name server, and splices the connection of this query until its end.
pub(super) async fn splice_connection(
    server: Server,
    query: u64,
    client: CellClient,
) -> io::Result<()> {
    let connected = async { TcpStream::connect(udp::address(&server).await?).await };
    let connection =
        timeout(QUERY_TIMEOUT, connected).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let (up, parts) = mpsc::channel(MAX_QUEUED_PARTS);
    // Fits, because the channel is empty.
    let _ = up.try_send(TunnelPart { query, ..TunnelPart::default() });
    let down = client.tunnel(parts).await.map_err(io::Error::other)?;
    splice(connection, up, down).await
}

/// Copies bytes both ways until both sides have ended, or were idle for [`TCP_IDLE_TIMEOUT`].
pub(super) async fn splice(
    mut connection: TcpStream,
    up: mpsc::Sender<TunnelPart>,
    mut down: impl Stream<Item = Result<TunnelPart, Failure>> + Unpin,
) -> io::Result<()> {
    let (mut read, mut write) = connection.split();
    let mut buffer = BytesMut::new();
    let (mut server_ended, mut pod_ended) = (false, false);
    // A side that doesn't read stops both directions. The time limit of idle connections ends it.
    let slow = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut until = Instant::now() + TCP_IDLE_TIMEOUT;
    while !(server_ended && pod_ended) {
        buffer.reserve(MAX_READ_BYTES);
        tokio::select! {
            part = down.next(), if !pod_ended => {
                // Without an end marker, the link was lost.
                let part = part.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
                timeout(TCP_IDLE_TIMEOUT, write.write_all(&part.content)).await.map_err(slow)??;
                pod_ended = part.end;
                if pod_ended {
                    write.shutdown().await?;
                }
            }
            length = read.read_buf(&mut buffer), if !server_ended => {
                server_ended = length? == 0;
                let part = TunnelPart {
                    content: buffer.split().freeze(),
                    end: server_ended,
                    ..TunnelPart::default()
                };
                if timeout(TCP_IDLE_TIMEOUT, up.send(part)).await.map_err(slow)?.is_err() {
                    return Ok(());
                }
            }
            () = sleep_until(until) => return Ok(()),
        }
        until = Instant::now() + TCP_IDLE_TIMEOUT;
    }
    Ok(())
}
