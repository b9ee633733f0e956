//! Calls that change containerd's state. They run to their end, even if no caller waits.

use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Running calls, in bounded number. The watcher of containerd uses them: the resources that a call
/// creates are complete when the call has ended.
#[derive(Debug)]
pub struct ChangingCalls {
    max: usize,
    permits: Arc<Semaphore>,
    ended: Arc<Notify>,
}

/// Running call; dropped at its end.
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

    /// Begins a call, or returns `None` if the maximum runs already.
    pub fn begin(&self) -> Option<ChangingCall> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(ChangingCall { permit: Some(permit), ended: Arc::clone(&self.ended) })
    }

    /// Returns whether a call runs.
    pub fn is_any_running(&self) -> bool {
        self.permits.available_permits() < self.max
    }

    /// Waits until a call ends, or returns at once if one has ended since the last wait. Supports
    /// one waiting task.
    pub async fn ended(&self) {
        self.ended.notified().await;
    }
}

impl Drop for ChangingCall {
    fn drop(&mut self) {
        // The notified task must not see the call as running.
        self.permit.take();
        self.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn end_of_a_call_is_notified_once_and_not_missed() {
        let calls = ChangingCalls::new(2);
        assert!(!calls.is_any_running() && calls.ended().now_or_never().is_none());
        let (one, other) = (calls.begin().unwrap(), calls.begin().unwrap());
        assert!(calls.begin().is_none(), "only two may run");
        assert!(calls.is_any_running() && calls.ended().now_or_never().is_none());
        drop(one);
        assert!(calls.is_any_running());
        drop(other);
        assert!(!calls.is_any_running());
        // Two ends before the wait cause one notification.
        assert!(calls.ended().now_or_never().is_some());
        assert!(calls.ended().now_or_never().is_none());
    }
}
