//! Inotify watches of directories on the node. All share one instance, because a user may have few.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kiyot_linux::inotify::{Inotify, ReadFlags, WatchFlags};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

/// Subscribers by watch descriptor.
type Watches = Arc<Mutex<HashMap<i32, Vec<Arc<Notify>>>>>;

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

    /// Notifies `subscriber` of changes in a directory. Called again for a path, it watches the
    /// directory that is there now.
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
            tracing::error!(%error, "volumes no longer watched, only compared periodically");
            return;
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
