//! Whether the thread of the CRI socket still does something.

use tokio::sync::{mpsc, oneshot};

/// Questions that may wait. More than one there is only while the thread is stuck.
const MOST: usize = 4;

type Question = oneshot::Sender<()>;

/// Asks.
#[derive(Debug, Clone)]
pub struct Pulse(mpsc::Sender<Question>);

/// Answers, on the thread that is asked for.
pub(super) struct Heart(mpsc::Receiver<Question>);

pub(super) fn new() -> (Pulse, Heart) {
    let (asks, answers) = mpsc::channel(MOST);
    (Pulse(asks), Heart(answers))
}

impl Pulse {
    /// Ready when the thread has answered: never while it is stuck, nor after its end.
    pub async fn felt(&self) {
        let (answer, answered) = oneshot::channel();
        if self.0.send(answer).await.is_err() || answered.await.is_err() {
            std::future::pending().await
        }
    }
}

impl Heart {
    /// Answers, until nobody is left to ask.
    pub(super) async fn beat(mut self) {
        while let Some(question) = self.0.recv().await {
            // Who does not wait any more needs no answer.
            let _ = question.send(());
        }
    }
}
