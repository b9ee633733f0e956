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
/// Someone knocked since the last [`ChildWaker::take_wake`].
const WOKEN: u8 = 2;

/// The state of one of the things that are polled.
#[derive(Debug)]
pub(super) struct ChildWaker {
    state: Arc<State>,
    /// What the thing is to wake.
    pub(super) waker: Waker,
}

#[derive(Debug)]
struct State {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.fetch_or(WOKEN, Ordering::SeqCst) == 0 {
            self.task.wake();
        }
    }
}

impl ChildWaker {
    /// With a knock at the beginning, so that the thing is polled a first time.
    pub(super) fn new() -> Self {
        let state = Arc::new(State { state: AtomicU8::new(WOKEN), task: AtomicWaker::new() });
        Self { waker: Waker::from(state.clone()), state }
    }

    /// Begins a round of the task.
    pub(super) fn begin_round(&self, cx: &Context<'_>) {
        self.state.task.register(cx.waker());
        self.state.state.fetch_or(IN_ROUND, Ordering::SeqCst);
    }

    /// Whether someone knocked since it was asked last. The thing is then to be polled.
    pub(super) fn take_wake(&self) -> bool {
        self.state.state.fetch_and(!WOKEN, Ordering::SeqCst) & WOKEN != 0
    }

    /// Ends the round. Whether someone has knocked and was not asked for: then the task needs
    /// another round, of which nobody tells it.
    pub(super) fn end_round(&self) -> bool {
        self.state.state.fetch_and(!IN_ROUND, Ordering::SeqCst) & WOKEN != 0
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Poll, thread};

    use super::*;

    #[tokio::test]
    async fn a_knock_between_rounds_wakes_the_task_once() {
        let knock = ChildWaker::new();
        let (mut rounds, mut knocks) = (0, 0);
        poll_fn(|cx| {
            knock.begin_round(cx);
            rounds += 1;
            while knock.take_wake() {
                knocks += 1;
                if knocks < 3 {
                    // Within the round: it is seen by the round itself.
                    knock.waker.wake_by_ref();
                }
            }
            assert!(!knock.end_round());
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
        let knock = ChildWaker::new();
        knock.begin_round(&Context::from_waker(Waker::noop()));
        assert!(knock.take_wake());
        knock.waker.wake_by_ref();
        assert!(knock.end_round());
        // And is there still in the next round.
        knock.begin_round(&Context::from_waker(Waker::noop()));
        assert!(knock.take_wake());
        assert!(!knock.take_wake());
        assert!(!knock.end_round());
    }

    #[tokio::test]
    async fn no_knock_of_another_thread_is_lost() {
        const KNOCKS: u32 = 20_000;
        let knock = ChildWaker::new();
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
            knock.begin_round(cx);
            if knock.take_wake() {
                seen = told.load(Ordering::SeqCst);
            }
            if knock.end_round() {
                cx.waker().wake_by_ref();
            }
            if seen == KNOCKS { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        knocker.join().unwrap();
    }
}
