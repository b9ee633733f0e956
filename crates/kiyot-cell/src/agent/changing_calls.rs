//! The calls that change containerd's state and run to their end, whoever waits for them.

use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The running calls. Bounded, and known to the watcher of containerd: what a call creates is
/// complete when the call has ended.
#[derive(Debug)]
pub struct ChangingCalls {
    max: usize,
    permits: Arc<Semaphore>,
    ended: Arc<Notify>,
}

/// A running call; dropped when it has ended.
#[derive(Debug)]
pub struct ChangingCall {
    permit: Option<OwnedSemaphorePermit>,
    ended: Arc<Notify>,
}

impl ChangingCalls {
    /// Creates the set for at most `max` calls.
    pub fn new(max: usize) -> Self {
        Self { max, permits: Arc::new(Semaphore::new(max)), ended: Arc::default() }
    }

    /// Begins a call, unless as many run as are allowed.
    pub fn begin(&self) -> Option<ChangingCall> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(ChangingCall { permit: Some(permit), ended: Arc::clone(&self.ended) })
    }

    /// Returns true while a call runs.
    pub fn is_any_running(&self) -> bool {
        self.permits.available_permits() < self.max
    }

    /// Waits until a call ends, or returns at once if one has ended since the last wait. For one
    /// waiting task.
    pub async fn ended(&self) {
        self.ended.notified().await;
    }
}

impl Drop for ChangingCall {
    fn drop(&mut self) {
        // Who is notified must not see the call as running.
        self.permit.take();
        self.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn end_of_a_call_is_told_once_and_not_missed() {
        let calls = ChangingCalls::new(2);
        assert!(!calls.is_any_running() && calls.ended().now_or_never().is_none());
        let (one, other) = (calls.begin().unwrap(), calls.begin().unwrap());
        assert!(calls.begin().is_none(), "only two may run");
        assert!(calls.is_any_running() && calls.ended().now_or_never().is_none());
        drop(one);
        assert!(calls.is_any_running());
        drop(other);
        assert!(!calls.is_any_running());
        // Two ends before the wait are one.
        assert!(calls.ended().now_or_never().is_some());
        assert!(calls.ended().now_or_never().is_none());
    }
}
