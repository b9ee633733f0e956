//! Relay of the link: connections of the virtual machine are copied to the gateway's unix socket.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::Path,
    time::Duration,
};

use kiyot_link::vm_file::{LINK_HOST, LINK_PORT};
use tokio::{
    io::copy_bidirectional_with_sizes,
    net::{self, TcpStream, UnixStream},
    task::JoinSet,
    time::{sleep, timeout},
};

/// Bounds the connections of a virtual machine; an agent has a control connection and a few bulk
/// connections. Further connections are closed at once.
pub const MAX_CONNECTIONS: usize = 32;
/// Bounds the bytes of a connection that are read ahead, in each direction.
const COPY_BUFFER_BYTES: usize = 64 * 1024;
/// Time limit for the gateway to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example when file descriptors are exhausted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listens on the link, in the network namespace of the calling thread.
pub fn listen() -> io::Result<TcpListener> {
    let listener = TcpListener::bind(SocketAddr::from((LINK_HOST, LINK_PORT)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Relays all connections, and returns only if the listener can't be used.
///
/// A connection ends when both sides have closed it. While the daemon does not run, connections are
/// closed at once, and the agent dials again.
pub async fn serve<T>(listener: TcpListener, gateway: &Path) -> io::Result<T> {
    let listener = net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((connection, _)) if connections.len() < MAX_CONNECTIONS => {
                    connections.spawn(relay(connection, gateway.to_owned()));
                }
                Ok(_) => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn relay(mut connection: TcpStream, gateway: std::path::PathBuf) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut gateway = timeout(CONNECT_TIMEOUT, UnixStream::connect(gateway)).await??;
    let (size, other) = (COPY_BUFFER_BYTES, COPY_BUFFER_BYTES);
    copy_bidirectional_with_sizes(&mut connection, &mut gateway, size, other).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixListener,
    };

    use super::*;

    /// Starts a relay on any port, and the gateway behind it.
    fn start(dir: &Path) -> (SocketAddr, UnixListener, JoinSet<io::Result<()>>) {
        let path = dir.join("gateway.sock");
        let gateway = UnixListener::bind(&path).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { serve(listener, &path).await });
        (address, gateway, tasks)
    }

    #[tokio::test]
    async fn half_closed_connection_still_carries_the_other_direction() {
        let dir = tempfile::tempdir().unwrap();
        let (address, gateway, _tasks) = start(dir.path());
        let mut guest = TcpStream::connect(address).await.unwrap();
        guest.write_all(b"question").await.unwrap();
        guest.shutdown().await.unwrap();
        let (mut daemon, _) = gateway.accept().await.unwrap();
        let mut read = String::new();
        daemon.read_to_string(&mut read).await.unwrap();
        assert_eq!(read, "question");
        daemon.write_all(b"answer").await.unwrap();
        drop(daemon);
        read.clear();
        guest.read_to_string(&mut read).await.unwrap();
        assert_eq!(read, "answer");
    }

    #[tokio::test]
    async fn connection_over_the_limit_is_closed_and_a_closed_connection_makes_room() {
        let dir = tempfile::tempdir().unwrap();
        let (address, gateway, _tasks) = start(dir.path());
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let guest = TcpStream::connect(address).await.unwrap();
            held.push((guest, gateway.accept().await.unwrap().0));
        }
        let mut further = TcpStream::connect(address).await.unwrap();
        let _reset = further.write_all(b"x").await;
        assert!(matches!(further.read(&mut [0]).await, Ok(0) | Err(_)));
        held.pop();
        // Until the relay notices the close, it closes further connections.
        let mut byte = [0];
        let mut open = loop {
            let mut guest = TcpStream::connect(address).await.unwrap();
            tokio::select! {
                accepted = gateway.accept() => break (guest, accepted.unwrap().0),
                closed = guest.read(&mut byte) => assert!(matches!(closed, Ok(0) | Err(_))),
            }
        };
        open.0.write_all(b"x").await.unwrap();
        assert_eq!(open.1.read(&mut byte).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn connection_without_a_gateway_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let (address, gateway, _tasks) = start(dir.path());
        drop(gateway);
        let mut guest = TcpStream::connect(address).await.unwrap();
        assert!(matches!(guest.read(&mut [0]).await, Ok(0) | Err(_)));
    }
}
