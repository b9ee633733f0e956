//! A limit on the time that one side does nothing, which costs nothing while it does something.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// Waits of one side, each limited.
#[derive(Debug)]
pub(super) struct IdleTimeout {
    limit: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl IdleTimeout {
    /// With a limit for each wait; `None` waits forever.
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, timer: None }
    }

    /// The side did something: the next wait begins anew.
    pub(super) fn reset(&mut self) {
        self.timer = None;
    }

    /// To be polled while waiting; ready when the wait is too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Duration> {
        let Some(limit) = self.limit else { return Poll::Pending };
        self.timer.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(cx).map(|()| limit)
    }
}
