//! One connection of a pod's to one name server, in the node's network.

use std::{io, time::Duration};

use bytes::BytesMut;
use futures::{Stream, StreamExt};
use kiyot_link::{
    channel::Channel,
    resolver::{QUERY_TIMEOUT, TCP_IDLE_TIMEOUT},
};
use kiyot_proto::cell::{TunnelPart, agent_client::AgentClient};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status};

use super::{Server, ask};

/// The most that is read of a connection at once, in bytes.
const PART: usize = 16 << 10;
/// Largest part that is taken from a cell.
const MAX_PART: usize = 1 << 20;
/// Parts that may wait for the link.
const WAITING: usize = 4;
/// How long a cell has to open a tunnel.
const OPEN: Duration = Duration::from_secs(20);

/// Connects to a name server, and carries the connection of this query until it ends.
pub(super) async fn carry(server: Server, query: u64, bulk: Channel) -> io::Result<()> {
    let connected = async { TcpStream::connect(ask::address(&server).await?).await };
    let connection =
        timeout(QUERY_TIMEOUT, connected).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let (up, parts) = mpsc::channel(WAITING);
    // There is room: it is the first.
    let _ = up.try_send(TunnelPart { query, ..TunnelPart::default() });
    let mut agent = AgentClient::new(bulk).max_decoding_message_size(MAX_PART);
    // No deadline of the call's own: a connection lasts as long as its two ends want.
    let opened = timeout(OPEN, agent.tunnel(Request::new(ReceiverStream::new(parts)))).await;
    let down = opened.map_err(|_| io::ErrorKind::TimedOut)?.map_err(io::Error::other)?.into_inner();
    splice(connection, up, down).await
}

/// Carries bytes both ways until both sides have ended, or nothing has gone either way for
/// [`TCP_IDLE_TIMEOUT`].
pub(super) async fn splice(
    mut connection: TcpStream,
    up: mpsc::Sender<TunnelPart>,
    mut down: impl Stream<Item = Result<TunnelPart, Status>> + Unpin,
) -> io::Result<()> {
    let (mut read, mut write) = connection.split();
    let mut buffer = BytesMut::new();
    let (mut server_ended, mut pod_ended) = (false, false);
    // One side may wait for the other to take something; for as long nothing else is carried, and
    // it may not be longer.
    let slow = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut until = Instant::now() + TCP_IDLE_TIMEOUT;
    while !(server_ended && pod_ended) {
        buffer.reserve(PART);
        tokio::select! {
            part = down.next(), if !pod_ended => {
                // Without an end the link is gone.
                let part = part.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
                timeout(TCP_IDLE_TIMEOUT, write.write_all(&part.content)).await.map_err(slow)??;
                pod_ended = part.end;
                if pod_ended {
                    write.shutdown().await?;
                }
            }
            length = read.read_buf(&mut buffer), if !server_ended => {
                server_ended = length? == 0;
                let part = TunnelPart { content: buffer.split().freeze(), end: server_ended, ..TunnelPart::default() };
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
