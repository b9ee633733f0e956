//! Timeouts of connections: without a call, or with a call that takes memory and does not end.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Frame, SizeHint};
use tokio::{sync::watch, time::timeout};
use tonic::body::Body;

/// The running calls of a connection.
#[derive(Debug, Clone)]
pub(super) struct Calls(Arc<watch::Sender<usize>>);

/// A running call. Dropping it ends the call.
#[derive(Debug)]
pub(super) struct Call(Arc<watch::Sender<usize>>);

impl Calls {
    /// Returns the count of a connection without calls.
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Counts a call that begins.
    pub(super) fn begin(&self) -> Call {
        self.0.send_modify(|calls| *calls += 1);
        Call(Arc::clone(&self.0))
    }

    /// Completes once no call has run for a time.
    pub(super) async fn idle_for(&self, time: Duration) {
        let mut calls = self.0.subscribe();
        loop {
            // The sender lives in `self`.
            let _ = calls.wait_for(|calls| *calls == 0).await;
            if timeout(time, calls.changed()).await.is_err() && *calls.borrow() == 0 {
                return;
            }
        }
    }

    /// Completes once calls have run for a time without a pause between them.
    pub(super) async fn busy_for(&self, time: Duration) {
        let mut calls = self.0.subscribe();
        loop {
            // The sender lives in `self`.
            let _ = calls.wait_for(|calls| *calls > 0).await;
            if timeout(time, calls.wait_for(|calls| *calls == 0)).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.send_modify(|calls| *calls = calls.saturating_sub(1));
    }
}

/// The body of a response, which holds a value until it is dropped.
#[derive(Debug)]
pub(super) struct HoldingBody<H> {
    body: Body,
    _held: H,
}

impl<H> HoldingBody<H> {
    /// Returns a body that holds a value.
    pub(super) fn new(body: Body, held: H) -> Self {
        Self { body, _held: held }
    }
}

impl<H: Unpin> http_body::Body for HoldingBody<H> {
    type Data = <Body as http_body::Body>::Data;
    type Error = <Body as http_body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Verifies O25.
    #[tokio::test(start_paused = true)]
    async fn connection_is_idle_after_its_last_call() {
        let calls = Calls::new();
        let call = calls.begin();
        let idle = calls.clone();
        let idle = tokio::spawn(async move { idle.idle_for(LIMIT).await });
        tokio::time::sleep(10 * LIMIT).await;
        assert!(!idle.is_finished(), "a call runs");
        drop(HoldingBody::new(Body::empty(), call));
        tokio::time::sleep(LIMIT / 2).await;
        drop(calls.begin());
        tokio::time::sleep(LIMIT * 3 / 4).await;
        assert!(!idle.is_finished(), "a call has begun since");
        tokio::time::sleep(LIMIT).await;
        assert!(idle.is_finished());
    }

    /// Verifies O25.
    #[tokio::test(start_paused = true)]
    async fn connection_is_busy_once_a_call_does_not_end() {
        let calls = Calls::new();
        let busy = calls.clone();
        let busy = tokio::spawn(async move { busy.busy_for(LIMIT).await });
        for _ in 0..3 {
            let call = calls.begin();
            tokio::time::sleep(LIMIT * 3 / 4).await;
            drop(call);
            tokio::time::sleep(LIMIT * 3 / 4).await;
        }
        assert!(!busy.is_finished(), "each call has ended");
        let _call = calls.begin();
        tokio::time::sleep(2 * LIMIT).await;
        assert!(busy.is_finished());
    }
}
