//! What wakes a task that polls several things in one round: so that a round knows which of them
//! have something to do, and what they do to one another within a round costs no round of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Wake, Waker},
};

use futures::task::AtomicWaker;

/// A round is under way: there is no need to wake the task.
const IN_ROUND: u8 = 1;
/// Someone knocked since the last [`Knock::take`].
const KNOCKED: u8 = 2;

/// The door of one of the things that are polled.
#[derive(Debug)]
pub(super) struct Knock {
    door: Arc<Door>,
    /// What the thing is to wake.
    pub(super) waker: Waker,
}

#[derive(Debug)]
struct Door {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for Door {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.fetch_or(KNOCKED, Ordering::SeqCst) == 0 {
            self.task.wake();
        }
    }
}

impl Knock {
    /// With a knock at the beginning, so that the thing is polled a first time.
    pub(super) fn new() -> Self {
        let door = Arc::new(Door { state: AtomicU8::new(KNOCKED), task: AtomicWaker::new() });
        Self { waker: Waker::from(door.clone()), door }
    }

    /// Begins a round of the task.
    pub(super) fn begin(&self, cx: &Context<'_>) {
        self.door.task.register(cx.waker());
        self.door.state.fetch_or(IN_ROUND, Ordering::SeqCst);
    }

    /// Whether someone knocked since it was asked last. The thing is then to be polled.
    pub(super) fn take(&self) -> bool {
        self.door.state.fetch_and(!KNOCKED, Ordering::SeqCst) & KNOCKED != 0
    }

    /// Ends the round. Whether someone has knocked and was not asked for: then the task needs
    /// another round, of which nobody tells it.
    pub(super) fn end(&self) -> bool {
        self.door.state.fetch_and(!IN_ROUND, Ordering::SeqCst) & KNOCKED != 0
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Poll, thread};

    use super::*;

    #[tokio::test]
    async fn a_knock_between_rounds_wakes_the_task_once() {
        let knock = Knock::new();
        let (mut rounds, mut knocks) = (0, 0);
        poll_fn(|cx| {
            knock.begin(cx);
            rounds += 1;
            while knock.take() {
                knocks += 1;
                if knocks < 3 {
                    // Within the round: it is seen by the round itself.
                    knock.waker.wake_by_ref();
                }
            }
            assert!(!knock.end());
            if rounds < 4 {
                knock.waker.wake_by_ref();
                knock.waker.wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!((rounds, knocks), (4, 6));
    }

    #[test]
    fn a_knock_that_no_turn_took_is_told_at_the_end() {
        let knock = Knock::new();
        knock.begin(&Context::from_waker(Waker::noop()));
        assert!(knock.take());
        knock.waker.wake_by_ref();
        assert!(knock.end());
        // And is there still in the next round.
        knock.begin(&Context::from_waker(Waker::noop()));
        assert!(knock.take());
        assert!(!knock.take());
        assert!(!knock.end());
    }

    #[tokio::test]
    async fn no_knock_of_another_thread_is_lost() {
        const KNOCKS: u32 = 20_000;
        let knock = Knock::new();
        let told = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let knocker = {
            let (waker, told) = (knock.waker.clone(), told.clone());
            thread::spawn(move || {
                for number in 1..=KNOCKS {
                    told.store(number, Ordering::SeqCst);
                    waker.wake_by_ref();
                }
            })
        };
        let mut seen = 0;
        poll_fn(|cx| {
            knock.begin(cx);
            if knock.take() {
                seen = told.load(Ordering::SeqCst);
            }
            if knock.end() {
                cx.waker().wake_by_ref();
            }
            if seen == KNOCKS { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        knocker.join().unwrap();
    }
}
