//! Liveness of the CRI server's thread.

use tokio::sync::{mpsc, oneshot};

/// Bound on waiting pings. Several wait only while the thread is stuck.
const MAX_PENDING_PINGS: usize = 4;

type Ping = oneshot::Sender<()>;

/// Handle that pings the thread.
#[derive(Debug, Clone)]
pub struct Watchdog(mpsc::Sender<Ping>);

/// Task on the thread that answers pings.
pub(super) struct Responder(mpsc::Receiver<Ping>);

pub(super) fn new() -> (Watchdog, Responder) {
    let (pings, received) = mpsc::channel(MAX_PENDING_PINGS);
    (Watchdog(pings), Responder(received))
}

impl Watchdog {
    /// Completes when the thread has answered: never while it is stuck or after its end.
    pub async fn ping(&self) {
        let (ping, answered) = oneshot::channel();
        if self.0.send(ping).await.is_err() || answered.await.is_err() {
            std::future::pending().await
        }
    }
}

impl Responder {
    /// Answers pings until all handles are dropped.
    pub(super) async fn run(mut self) {
        while let Some(ping) = self.0.recv().await {
            // A caller that stopped waiting needs no answer.
            let _ = ping.send(());
        }
    }
}
