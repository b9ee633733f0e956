//! A value that tasks wait for. It takes what the value takes: tokio's `watch` has eight lists of
//! tasks that wait, some 300 bytes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A value that some change and others wait for.
#[derive(Debug, Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    /// With a first value.
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    /// Changes it, or looks at it only. Whoever waits does not look at it again for this.
    pub fn with<R>(&self, use_it: impl FnOnce(&mut T) -> R) -> R {
        use_it(&mut self.value())
    }

    /// Changes it, and has all who wait look at it again.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let changed = change(&mut self.value());
        self.changed.notify_waiters();
        changed
    }

    /// Waits until `look` finds something in it. No change is missed, but of changes that come one
    /// soon after another only the last may be seen.
    pub async fn wait_for<R>(&self, mut look: impl FnMut(&T) -> Option<R>) -> R {
        loop {
            // Made before the look: a change after it wakes it, be it polled or not.
            let changed = self.changed.notified();
            let found = look(&self.value());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    fn value(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::Arc, task::Context};

    use super::*;

    #[test]
    fn who_waits_is_woken_by_a_change_and_by_nothing_else() {
        let watched = Watched::new(0);
        let mut wait = pin!(watched.wait_for(|value| (*value > 1).then_some(*value)));
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(wait.as_mut().poll(&mut context).is_pending());
        watched.change(|value| *value = 1);
        assert!(wait.as_mut().poll(&mut context).is_pending());
        watched.with(|value| *value = 2);
        assert!(wait.as_mut().poll(&mut context).is_pending(), "nobody said so");
        watched.change(|value| *value = 3);
        assert_eq!(wait.as_mut().poll(&mut context), std::task::Poll::Ready(3));
        assert_eq!(watched.with(|value| *value), 3);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_change_is_missed_by_any_of_many() {
        const STEPS: usize = 2000;
        let watched = Arc::new(Watched::new(0));
        // Each waits for the step before its own: one change that is missed, and all stand still.
        let tasks: Vec<_> = (0..4)
            .map(|own| {
                let watched = Arc::clone(&watched);
                tokio::spawn(async move {
                    for step in (own..STEPS).step_by(4) {
                        watched.wait_for(|value| (*value == step).then_some(())).await;
                        watched.change(|value| *value += 1);
                    }
                })
            })
            .collect();
        for task in tasks {
            tokio::time::timeout(std::time::Duration::from_secs(60), task)
                .await
                .expect("a change was missed")
                .unwrap();
        }
        assert_eq!(watched.with(|value| *value), STEPS);
    }
}
