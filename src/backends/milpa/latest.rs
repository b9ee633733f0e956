//! The latest value of something, for one reader. It takes what the value takes: tokio's `watch`
//! has eight lists of readers, some 300 bytes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A value that others change, and one task waits for the changes of.
#[derive(Debug, Default)]
pub(super) struct Latest<T> {
    value: Mutex<T>,
    rung: Notify,
}

impl<T: Clone> Latest<T> {
    /// With a first value, which counts as a change.
    pub(super) fn new(value: T) -> Self {
        let latest = Self { value: Mutex::new(value), rung: Notify::new() };
        latest.rung.notify_one();
        latest
    }

    /// Changes it, and says so if `change` says so.
    pub(super) fn change(&self, change: impl FnOnce(&mut T) -> bool) {
        let changed = change(&mut self.value());
        if changed {
            self.rung.notify_one();
        }
    }

    /// Waits for a change since the last time that this returned. Only the one reader calls it.
    pub(super) async fn changed(&self) {
        self.rung.notified().await;
    }

    /// The value of now.
    pub(super) fn get(&self) -> T {
        self.value().clone()
    }

    /// Something of the value of now.
    pub(super) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.value())
    }

    fn value(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_change_is_seen_once_and_never_missed() {
        let latest = Latest::new(1);
        latest.changed().await;
        assert!(latest.changed().now_or_never().is_none());
        latest.change(|value| {
            *value = 2;
            false
        });
        assert!(latest.changed().now_or_never().is_none(), "nothing to be said");
        for next in 3..5 {
            latest.change(|value| {
                *value = next;
                true
            });
        }
        latest.changed().await;
        assert_eq!(latest.get(), 4);
        assert!(latest.changed().now_or_never().is_none());
    }
}
