//! Per-child wakers. A task that polls several futures in rounds polls only the children that were
//! woken. A wake-up within a round costs no further round.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Wake, Waker},
};

use futures::task::AtomicWaker;

/// Flag: a round is running, so that the task need not be woken.
const IN_ROUND: u8 = 1;
/// Flag: the child was woken since the last [`ChildWaker::take_wake`].
const WOKEN: u8 = 2;

/// The wake-ups of a child.
#[derive(Debug)]
pub(super) struct ChildWaker {
    state: Arc<State>,
    /// The waker to poll the child with.
    pub(super) waker: Waker,
}

#[derive(Debug)]
struct State {
    flags: AtomicU8,
    task: AtomicWaker,
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.flags.fetch_or(WOKEN, Ordering::SeqCst) == 0 {
            self.task.wake();
        }
    }
}

impl ChildWaker {
    /// Makes a woken waker, so that the child is polled a first time.
    pub(super) fn new() -> Self {
        let state = Arc::new(State { flags: AtomicU8::new(WOKEN), task: AtomicWaker::new() });
        Self { waker: Waker::from(state.clone()), state }
    }

    /// Begins a round of the task.
    pub(super) fn begin_round(&self, cx: &Context<'_>) {
        self.state.task.register(cx.waker());
        self.state.flags.fetch_or(IN_ROUND, Ordering::SeqCst);
    }

    /// Returns whether the child was woken since the last call and must be polled.
    pub(super) fn take_wake(&self) -> bool {
        self.state.flags.fetch_and(!WOKEN, Ordering::SeqCst) & WOKEN != 0
    }

    /// Ends the round. Returns whether a wake-up was not taken: the caller then has to wake its own
    /// task, because this waker does not.
    pub(super) fn end_round(&self) -> bool {
        self.state.flags.fetch_and(!IN_ROUND, Ordering::SeqCst) & WOKEN != 0
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, sync::atomic::AtomicU32, task::Poll, thread};

    use super::*;

    #[tokio::test]
    async fn wake_between_rounds_wakes_the_task_once() {
        let child = ChildWaker::new();
        let (mut rounds, mut wakes) = (0, 0);
        poll_fn(|cx| {
            child.begin_round(cx);
            rounds += 1;
            while child.take_wake() {
                wakes += 1;
                if wakes < 3 {
                    // The same round takes this wake-up.
                    child.waker.wake_by_ref();
                }
            }
            assert!(!child.end_round());
            if rounds < 4 {
                child.waker.wake_by_ref();
                child.waker.wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!((rounds, wakes), (4, 6));
    }

    #[test]
    fn wake_that_was_not_taken_is_returned_at_the_end_of_the_round() {
        let child = ChildWaker::new();
        child.begin_round(&Context::from_waker(Waker::noop()));
        assert!(child.take_wake());
        child.waker.wake_by_ref();
        assert!(child.end_round());
        // The next round still takes it.
        child.begin_round(&Context::from_waker(Waker::noop()));
        assert!(child.take_wake());
        assert!(!child.take_wake());
        assert!(!child.end_round());
    }

    #[tokio::test]
    async fn wakes_of_another_thread_are_not_lost() {
        const WAKES: u32 = 20_000;
        let child = ChildWaker::new();
        let sent = Arc::new(AtomicU32::new(0));
        let sender = {
            let (waker, sent) = (child.waker.clone(), sent.clone());
            thread::spawn(move || {
                for number in 1..=WAKES {
                    sent.store(number, Ordering::SeqCst);
                    waker.wake_by_ref();
                }
            })
        };
        let mut seen = 0;
        poll_fn(|cx| {
            child.begin_round(cx);
            if child.take_wake() {
                seen = sent.load(Ordering::SeqCst);
            }
            if child.end_round() {
                cx.waker().wake_by_ref();
            }
            if seen == WAKES { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        sender.join().unwrap();
    }
}
