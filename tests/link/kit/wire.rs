//! A wire that can be cut, or left lying without a sound.

use std::{path::PathBuf, sync::Mutex};

use kiyot_link::bootstrap::GatewayAddress;
use tokio::{
    io::AsyncWriteExt,
    net::{UnixListener, UnixStream},
    sync::watch,
    task::AbortHandle,
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Between an agent and its gateway.
pub(crate) struct Wire {
    pub(crate) address: GatewayAddress,
    shared: std::sync::Arc<Shared>,
    _end: DropGuard,
}

struct Shared {
    wires: Mutex<Vec<AbortHandle>>,
    /// Wires with a number up to this one carry nothing.
    silent: watch::Sender<usize>,
}

impl Wire {
    pub(crate) fn start(path: PathBuf, to: &GatewayAddress) -> Self {
        let GatewayAddress::Unix(to) = to.clone() else { panic!("a unix socket") };
        let listener = UnixListener::bind(&path).unwrap();
        let shared =
            std::sync::Arc::new(Shared { wires: Mutex::default(), silent: watch::Sender::new(0) });
        let end = CancellationToken::new();
        let (own, token) = (shared.clone(), end.clone());
        tokio::spawn(token.run_until_cancelled_owned(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let mut wires = own.wires.lock().unwrap();
                let number = wires.len() + 1;
                let mut silent = own.silent.subscribe();
                let to = to.clone();
                let wire = tokio::spawn(async move {
                    let Ok(far) = UnixStream::connect(&to).await else { return };
                    carry(near, far, async {
                        let _ = silent.wait_for(|silent| *silent >= number).await;
                    })
                    .await;
                });
                wires.push(wire.abort_handle());
            }
        }));
        Self { address: GatewayAddress::Unix(path), shared, _end: end.drop_guard() }
    }

    /// Cuts all connections that there are.
    pub(crate) fn cut(&self) {
        self.shared.wires.lock().unwrap().iter().for_each(AbortHandle::abort);
    }

    /// All connections that there are carry nothing any more, and stay open. New ones do carry.
    pub(crate) fn silence(&self) {
        let wires = self.shared.wires.lock().unwrap().len();
        self.shared.silent.send_replace(wires);
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
