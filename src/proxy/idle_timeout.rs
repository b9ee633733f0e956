//! An idle timeout, whose timer exists only while its side is idle.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// A limit on each period in which a side makes no progress.
#[derive(Debug)]
pub(super) struct IdleTimeout {
    limit: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl IdleTimeout {
    /// Makes a timeout; `None` waits without a limit.
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, timer: None }
    }

    /// Records progress: the next wait starts anew.
    pub(super) fn reset(&mut self) {
        self.timer = None;
    }

    /// Completes with the limit after the side was idle for this long. Poll it only while the side
    /// is idle.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let Some(limit) = self.limit else { return Poll::Pending };
        self.timer.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(cx).map(|()| limit)
    }
}
