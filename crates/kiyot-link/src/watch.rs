//! A watched value in little memory: tokio's `watch` has eight lists of waiting tasks, some 300
//! bytes, and a cell has several watched values.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Value that tasks wait for.
#[derive(Debug, Default)]
pub struct Watch<T> {
    state: Mutex<WatchState<T>>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct WatchState<T> {
    value: T,
    /// Number of published changes.
    version: u64,
}

/// Version of a value that a reader has seen. The default is older than all versions.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Seen(Option<u64>);

impl<T> Watch<T> {
    /// Creates a watch with an initial value.
    pub fn new(value: T) -> Self {
        Self { state: Mutex::new(WatchState { value, version: 0 }), changed: Notify::new() }
    }

    /// Reads or modifies the value without waking tasks.
    pub fn with<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        access(&mut self.state().value)
    }

    /// Modifies the value and publishes the change.
    pub fn modify<R>(&self, modify: impl FnOnce(&mut T) -> R) -> R {
        let mut state = self.state();
        let result = modify(&mut state.value);
        self.publish(state);
        result
    }

    /// Modifies the value, and publishes the change if `modify` returns true.
    pub fn modify_if(&self, modify: impl FnOnce(&mut T) -> bool) {
        let mut state = self.state();
        if modify(&mut state.value) {
            self.publish(state);
        }
    }

    /// Waits until `find` returns a result. No published change is missed, but several quick
    /// changes may be seen as one.
    pub async fn wait_for<R>(&self, mut find: impl FnMut(&T) -> Option<R>) -> R {
        self.wait(|state| find(&state.value)).await
    }

    /// Waits for a version other than the seen one, and marks it as seen.
    pub async fn changed(&self, seen: &mut Seen) {
        let previous = *seen;
        let current = |state: &WatchState<T>| Some(Seen(Some(state.version)));
        *seen = self.wait(|state| current(state).filter(|seen| *seen != previous)).await;
    }

    async fn wait<R>(&self, mut find: impl FnMut(&WatchState<T>) -> Option<R>) -> R {
        loop {
            // Created before the check, so that a change after the check wakes it.
            let changed = self.changed.notified();
            let found = find(&self.state());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    fn publish(&self, mut state: MutexGuard<'_, WatchState<T>>) {
        state.version += 1;
        drop(state);
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, WatchState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::Arc, task::Context};

    use super::*;

    #[test]
    fn waiting_task_is_woken_by_published_changes_only() {
        let watch = Watch::new(0);
        let mut wait = pin!(watch.wait_for(|value| (*value > 1).then_some(*value)));
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(wait.as_mut().poll(&mut context).is_pending());
        watch.modify(|value| *value = 1);
        assert!(wait.as_mut().poll(&mut context).is_pending());
        watch.with(|value| *value = 2);
        assert!(wait.as_mut().poll(&mut context).is_pending(), "not published");
        watch.modify(|value| *value = 3);
        assert_eq!(wait.as_mut().poll(&mut context), std::task::Poll::Ready(3));
        assert_eq!(watch.with(|value| *value), 3);
    }

    #[test]
    fn change_is_seen_once_by_each_reader() {
        let watch = Watch::new(1);
        let is_changed = |seen: &mut Seen| {
            let mut context = Context::from_waker(std::task::Waker::noop());
            pin!(watch.changed(seen)).poll(&mut context).is_ready()
        };
        let (mut first, mut second) = (Seen::default(), Seen::default());
        assert!(is_changed(&mut first), "the initial value is new");
        assert!(!is_changed(&mut first));
        watch.modify_if(|value| {
            *value = 2;
            false
        });
        assert!(!is_changed(&mut first), "not published");
        for next in 3..5 {
            watch.modify(|value| *value = next);
        }
        assert!(is_changed(&mut first) && is_changed(&mut second));
        assert_eq!(watch.with(|value| *value), 4);
        assert!(!is_changed(&mut first) && !is_changed(&mut second));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn concurrent_waiters_miss_no_change() {
        const STEPS: usize = 2000;
        let watch = Arc::new(Watch::new(0));
        // Each task waits for the previous task's step, so that a missed change stops all tasks.
        let tasks: Vec<_> = (0..4)
            .map(|own| {
                let watch = Arc::clone(&watch);
                tokio::spawn(async move {
                    for step in (own..STEPS).step_by(4) {
                        watch.wait_for(|value| (*value == step).then_some(())).await;
                        watch.modify(|value| *value += 1);
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
        assert_eq!(watch.with(|value| *value), STEPS);
    }
}
