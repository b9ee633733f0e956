//! Bounded mailbox of a task. An empty mailbox needs almost no memory.
//!
//! A tokio channel allocates a block of 32 slots and padding, 1 to 2 KB, even if it is empty. Each
//! cell has four mailboxes.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, Semaphore};

/// Error of sending a message: the task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the mailbox is closed")]
pub(super) struct SendError;

/// Sending side. Cheap to clone.
pub(super) struct Sender<T>(Arc<Shared<T>>);

/// Receiving side. Dropping it drops the waiting messages.
pub(super) struct Receiver<T>(Arc<Shared<T>>);

struct Shared<T> {
    /// Waiting messages; `None` once the receiver is dropped.
    waiting: Mutex<Option<VecDeque<T>>>,
    room: Semaphore,
    arrived: Notify,
}

/// Creates a mailbox for at most `capacity` messages.
pub(super) fn mailbox<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        waiting: Mutex::new(Some(VecDeque::new())),
        room: Semaphore::new(capacity),
        arrived: Notify::new(),
    });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Shared<T> {
    fn waiting(&self) -> MutexGuard<'_, Option<VecDeque<T>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Sender<T> {
    /// Sends a message as soon as there is room.
    pub(super) async fn send(&self, message: T) -> Result<(), SendError> {
        self.0.room.acquire().await.map_err(|_| SendError)?.forget();
        self.push(message)
    }

    fn push(&self, message: T) -> Result<(), SendError> {
        self.0.waiting().as_mut().ok_or(SendError)?.push_back(message);
        self.0.arrived.notify_one();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Receives the next message. Cancel-safe. Waits forever without senders: the owner ends the
    /// task.
    pub(super) async fn recv(&mut self) -> T {
        loop {
            if let Some(message) = self.take() {
                return message;
            }
            self.0.arrived.notified().await;
        }
    }

    fn take(&mut self) -> Option<T> {
        let mut waiting = self.0.waiting();
        let queue = waiting.as_mut()?;
        let message = queue.pop_front()?;
        if queue.is_empty() {
            *queue = VecDeque::new();
        }
        self.0.room.add_permits(1);
        Some(message)
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.room.close();
        let messages = self.0.waiting().take();
        // Outside of the lock, because dropping a message may notify its sender.
        drop(messages);
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt as _;
    use tokio::{sync::oneshot, time::timeout};

    use super::*;

    #[tokio::test]
    async fn messages_arrive_in_order_and_are_limited() {
        let (sender, mut receiver) = mailbox(2);
        sender.send(1).await.unwrap();
        sender.send(2).await.unwrap();
        let mut third = std::pin::pin!(sender.send(3));
        assert!(third.as_mut().now_or_never().is_none(), "a third message waits for room");
        assert_eq!(receiver.recv().await, 1);
        third.await.unwrap();
        assert_eq!((receiver.recv().await, receiver.recv().await), (2, 3));
        assert_eq!(
            receiver.0.waiting().as_ref().unwrap().capacity(),
            0,
            "an empty mailbox has no buffer"
        );
        assert!(receiver.recv().now_or_never().is_none());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn concurrent_and_cancelled_receives_lose_no_message() {
        const EACH: usize = 2000;
        let (sender, mut receiver) = mailbox(3);
        let senders: Vec<_> = (0..4)
            .map(|from| {
                let sender = sender.clone();
                tokio::spawn(async move {
                    for at in 0..EACH {
                        sender.send((from, at)).await.unwrap();
                    }
                })
            })
            .collect();
        let mut next = [0; 4];
        while next != [EACH; 4] {
            // Cancelled repeatedly.
            let Ok((from, at)) = timeout(Duration::from_micros(50), receiver.recv()).await else {
                continue;
            };
            assert_eq!(at, next[from]);
            next[from] += 1;
        }
        for sender in senders {
            sender.await.unwrap();
        }
    }

    #[tokio::test]
    async fn dropped_receiver_fails_waiting_senders() {
        let (sender, receiver) = mailbox(1);
        let (answer, answered) = oneshot::channel::<()>();
        sender.send(answer).await.unwrap();
        let late = sender.send(oneshot::channel().0);
        drop(receiver);
        assert!(answered.await.is_err());
        assert_eq!(late.await, Err(SendError));
    }
}
