//! A proxy between agents and the gateway. Its connections can be cut while both run.

use std::path::Path;

use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A proxy at the path of the gateway's socket. Its drop cuts all connections.
pub(crate) struct LinkProxy(#[expect(dead_code, reason = "its drop ends the proxy")] DropGuard);

impl LinkProxy {
    /// Starts a proxy for new connections.
    pub(crate) fn start(state: &Path) -> Self {
        let (near, far) = (state.join("gateway.sock"), state.join("far.sock"));
        if far.exists() {
            std::fs::remove_file(&near).unwrap();
        } else {
            std::fs::rename(&near, &far).unwrap();
        }
        let listener = UnixListener::bind(&near).unwrap();
        let end = CancellationToken::new();
        let all = end.clone();
        tokio::spawn(end.clone().run_until_cancelled_owned(async move {
            loop {
                let (mut one, _) = listener.accept().await.unwrap();
                let mut other = UnixStream::connect(&far).await.unwrap();
                tokio::spawn(all.clone().run_until_cancelled_owned(async move {
                    let _ = tokio::io::copy_bidirectional(&mut one, &mut other).await;
                }));
            }
        }));
        Self(end.drop_guard())
    }
}
