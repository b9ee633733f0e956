//! Inotify watches of directories on the node. All share an instance, because a user may have few
//! instances.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kiyot_linux::inotify::{Inotify, ReadFlags, WatchFlags};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

/// Subscribers by watch descriptor.
type Watches = Arc<Mutex<HashMap<i32, Vec<Arc<Notify>>>>>;

/// Pause after a failure to read events.
const READ_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The watcher of all pods, started at its first use.
#[derive(Debug)]
pub(super) struct SharedWatcher {
    start: fn() -> io::Result<Watcher>,
    state: Mutex<SharedState>,
}

#[derive(Debug, Default)]
struct SharedState {
    watcher: Option<Arc<Watcher>>,
    has_failed: bool,
}

impl Default for SharedWatcher {
    fn default() -> Self {
        Self::started_by(Watcher::start)
    }
}

impl SharedWatcher {
    pub(super) fn started_by(start: fn() -> io::Result<Watcher>) -> Self {
        Self { start, state: Mutex::default() }
    }

    /// Returns the watcher; `None` if the kernel has no free instance. The next call tries again.
    pub(super) fn started(&self) -> Option<Arc<Watcher>> {
        let mut state = self.state();
        if state.watcher.is_none() {
            match (self.start)() {
                Ok(watcher) => {
                    state.watcher = Some(Arc::new(watcher));
                    if state.has_failed {
                        tracing::info!("volumes watched again");
                    }
                }
                // Each pod tries again: the failure is logged once.
                Err(_) if state.has_failed => {}
                Err(error) => {
                    state.has_failed = true;
                    tracing::warn!(
                        %error,
                        limit = "fs.inotify.max_user_instances",
                        "volumes not watched, only compared periodically"
                    );
                }
            }
        }
        state.watcher.clone()
    }

    /// Removes a subscriber from all directories.
    pub(super) fn forget(&self, subscriber: &Arc<Notify>) {
        let watcher = self.state().watcher.clone();
        if let Some(watcher) = watcher {
            watcher.forget(subscriber);
        }
    }

    fn state(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches directories, until it is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    inotify: Arc<Inotify>,
    watches: Watches,
    _reader: AbortOnDropHandle<()>,
}

impl Watcher {
    /// Starts a watcher without directories.
    pub(super) fn start() -> io::Result<Self> {
        let inotify = Arc::new(Inotify::new()?);
        let watches = Watches::default();
        let reader =
            AbortOnDropHandle::new(tokio::spawn(read(Arc::clone(&inotify), Arc::clone(&watches))));
        Ok(Self { inotify, watches, _reader: reader })
    }

    /// Notifies `subscriber` of changes in a directory. A repeated call watches the directory that
    /// has the path by then.
    pub(super) fn add(&self, path: &Path, subscriber: &Arc<Notify>) -> io::Result<()> {
        let flags = WatchFlags::MOVED_TO
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW;
        // Locked before the watch exists, so that its first events find the subscriber.
        let mut watches = locked(&self.watches);
        let watch = self.inotify.add(path, flags)?;
        let subscribers = watches.entry(watch).or_default();
        if !subscribers.iter().any(|other| Arc::ptr_eq(other, subscriber)) {
            subscribers.push(Arc::clone(subscriber));
        }
        Ok(())
    }

    /// Removes a subscriber from all directories.
    pub(super) fn forget(&self, subscriber: &Arc<Notify>) {
        locked(&self.watches).retain(|watch, subscribers| {
            subscribers.retain(|other| !Arc::ptr_eq(other, subscriber));
            if subscribers.is_empty() {
                // Fails if the directory was deleted.
                let _ = self.inotify.remove(*watch);
            }
            !subscribers.is_empty()
        });
    }
}

async fn read(inotify: Arc<Inotify>, watches: Watches) {
    loop {
        if let Err(error) = inotify.read(|watch, events| notify(&watches, watch, events)).await {
            tracing::error!(%error, "changes of volumes not read, trying again");
            tokio::time::sleep(READ_RETRY_DELAY).await;
        }
    }
}

fn notify(watches: &Watches, watch: i32, events: ReadFlags) {
    let mut watches = locked(watches);
    if events.contains(ReadFlags::QUEUE_OVERFLOW) {
        watches.values().flatten().for_each(|subscriber| subscriber.notify_one());
    }
    if let Some(subscribers) = watches.get(&watch) {
        subscribers.iter().for_each(|subscriber| subscriber.notify_one());
    }
    if events.contains(ReadFlags::IGNORED) {
        watches.remove(&watch);
    }
}

fn locked(watches: &Watches) -> MutexGuard<'_, HashMap<i32, Vec<Arc<Notify>>>> {
    watches.lock().unwrap_or_else(PoisonError::into_inner)
}
