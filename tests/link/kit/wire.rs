//! A proxy between an agent and its gateway that can cut connections, or stop carrying bytes.

use std::{path::PathBuf, sync::Mutex};

use kiyot_link::bootstrap::GatewayAddress;
use tokio::{
    io::AsyncWriteExt,
    net::{UnixListener, UnixStream},
    sync::watch,
    task::AbortHandle,
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A proxy for the connections of an agent.
pub(crate) struct Wire {
    pub(crate) address: GatewayAddress,
    shared: std::sync::Arc<Shared>,
    _end: DropGuard,
}

struct Shared {
    connections: Mutex<Vec<AbortHandle>>,
    /// Connections up to this number carry nothing.
    silent: watch::Sender<usize>,
}

impl Wire {
    pub(crate) fn start(path: PathBuf, to: &GatewayAddress) -> Self {
        let GatewayAddress::Unix(to) = to.clone() else { panic!("a unix socket") };
        let listener = UnixListener::bind(&path).unwrap();
        let shared = std::sync::Arc::new(Shared {
            connections: Mutex::default(),
            silent: watch::Sender::new(0),
        });
        let end = CancellationToken::new();
        let (own, token) = (shared.clone(), end.clone());
        tokio::spawn(token.run_until_cancelled_owned(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let mut connections = own.connections.lock().unwrap();
                let number = connections.len() + 1;
                let mut silent = own.silent.subscribe();
                let to = to.clone();
                let connection = tokio::spawn(async move {
                    let Ok(far) = UnixStream::connect(&to).await else { return };
                    carry(near, far, async {
                        let _ = silent.wait_for(|silent| *silent >= number).await;
                    })
                    .await;
                });
                connections.push(connection.abort_handle());
            }
        }));
        Self { address: GatewayAddress::Unix(path), shared, _end: end.drop_guard() }
    }

    /// Closes all current connections.
    pub(crate) fn cut(&self) {
        self.shared.connections.lock().unwrap().iter().for_each(AbortHandle::abort);
    }

    /// Stops carrying bytes on all current connections, which stay open. New ones work.
    pub(crate) fn silence(&self) {
        let connections = self.shared.connections.lock().unwrap().len();
        self.shared.silent.send_replace(connections);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.cut();
    }
}

async fn carry(mut near: UnixStream, mut far: UnixStream, silenced: impl Future<Output = ()>) {
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {
            let _ = near.shutdown().await;
            let _ = far.shutdown().await;
        }
        () = silenced => std::future::pending().await,
    }
}
