//! A bounded mailbox of one task, which holds next to nothing while no message waits in it.
//!
//! A channel of tokio's has a block of 32 places and much padding, 1 to 2 KB, used or not. There
//! are four of these to each cell.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, Semaphore};

/// A message was not taken: the task has ended, or as many wait as may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nobody takes messages any more, or too many wait")]
pub(super) struct NotTaken;

/// The side that sends. Cheap to clone.
pub(super) struct Sender<T>(Arc<Shared<T>>);

/// The side of the task. Messages that still wait when it is dropped are dropped with it.
pub(super) struct Receiver<T>(Arc<Shared<T>>);

struct Shared<T> {
    /// `None` when nobody receives any more.
    waiting: Mutex<Option<VecDeque<T>>>,
    room: Semaphore,
    rung: Notify,
}

/// A mailbox with room for so many messages.
pub(super) fn mailbox<T>(room: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        waiting: Mutex::new(Some(VecDeque::new())),
        room: Semaphore::new(room),
        rung: Notify::new(),
    });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl<T> Shared<T> {
    fn waiting(&self) -> MutexGuard<'_, Option<VecDeque<T>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Sender<T> {
    /// Leaves a message, as soon as there is room.
    pub(super) async fn send(&self, message: T) -> Result<(), NotTaken> {
        self.0.room.acquire().await.map_err(|_| NotTaken)?.forget();
        self.leave(message)
    }

    /// Leaves a message if there is room.
    pub(super) fn try_send(&self, message: T) -> Result<(), NotTaken> {
        self.0.room.try_acquire().map_err(|_| NotTaken)?.forget();
        self.leave(message)
    }

    fn leave(&self, message: T) -> Result<(), NotTaken> {
        self.0.waiting().as_mut().ok_or(NotTaken)?.push_back(message);
        self.0.rung.notify_one();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// The next message. Given up, it loses none. It waits for ever when there are no senders left:
    /// whoever owns the task ends it.
    pub(super) async fn recv(&mut self) -> T {
        loop {
            if let Some(message) = self.take() {
                return message;
            }
            self.0.rung.notified().await;
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
        let left = self.0.waiting().take();
        // Without the lock: dropping a message may tell whoever sent it.
        drop(left);
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
    async fn messages_come_in_their_order_and_no_more_wait_than_may() {
        let (sender, mut receiver) = mailbox(2);
        sender.send(1).await.unwrap();
        sender.try_send(2).unwrap();
        assert_eq!(sender.try_send(3), Err(NotTaken));
        let mut third = std::pin::pin!(sender.send(3));
        assert!(third.as_mut().now_or_never().is_none(), "there is room for two");
        assert_eq!(receiver.recv().await, 1);
        third.await.unwrap();
        assert_eq!((receiver.recv().await, receiver.recv().await), (2, 3));
        assert_eq!(receiver.0.waiting().as_ref().unwrap().capacity(), 0, "nothing is held at rest");
        assert!(receiver.recv().now_or_never().is_none());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn none_is_lost_between_tasks_and_when_a_wait_is_given_up() {
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
            // Given up again and again.
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
    async fn who_waits_for_an_answer_is_told_when_the_task_ends() {
        let (sender, receiver) = mailbox(1);
        let (answer, answered) = oneshot::channel::<()>();
        sender.send(answer).await.unwrap();
        let late = sender.send(oneshot::channel().0);
        drop(receiver);
        assert!(answered.await.is_err());
        assert_eq!(late.await, Err(NotTaken));
    }
}
