//! Whether the thread of the CRI socket still does something.

use tokio::sync::{mpsc, oneshot};

/// Questions that may wait. More than one there is only while the thread is stuck.
const MAX_PENDING_PINGS: usize = 4;

type Ping = oneshot::Sender<()>;

/// Asks.
#[derive(Debug, Clone)]
pub struct Watchdog(mpsc::Sender<Ping>);

/// Answers, on the thread that is asked for.
pub(super) struct Responder(mpsc::Receiver<Ping>);

pub(super) fn new() -> (Watchdog, Responder) {
    let (asks, answers) = mpsc::channel(MAX_PENDING_PINGS);
    (Watchdog(asks), Responder(answers))
}

impl Watchdog {
    /// Ready when the thread has answered: never while it is stuck, nor after its end.
    pub async fn ping(&self) {
        let (answer, answered) = oneshot::channel();
        if self.0.send(answer).await.is_err() || answered.await.is_err() {
            std::future::pending().await
        }
    }
}

impl Responder {
    /// Answers, until nobody is left to ask.
    pub(super) async fn run(mut self) {
        while let Some(question) = self.0.recv().await {
            // Who does not wait any more needs no answer.
            let _ = question.send(());
        }
    }
}
