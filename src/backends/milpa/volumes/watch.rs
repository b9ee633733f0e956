//! News of directories on the node, by inotify. One instance for all, since a user may have few.

use std::{
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, sync::Notify};
use tokio_util::task::AbortOnDropHandle;

/// Who is told of a directory's news.
type Watches = Arc<Mutex<HashMap<i32, Vec<Arc<Notify>>>>>;

/// Watches directories, until it is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    fd: Arc<AsyncFd<OwnedFd>>,
    watches: Watches,
    _reader: AbortOnDropHandle<()>,
}

impl Watcher {
    /// Watches nothing yet.
    pub(super) fn start() -> io::Result<Self> {
        #[expect(
            deprecated,
            reason = "what replaces it is unsafe; an OwnedFd has the I/O safety that it asks for"
        )]
        let fd =
            Arc::new(AsyncFd::new(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?)?);
        let watches = Watches::default();
        let reader =
            AbortOnDropHandle::new(tokio::spawn(read(Arc::clone(&fd), Arc::clone(&watches))));
        Ok(Self { fd, watches, _reader: reader })
    }

    /// Tells of a directory's news from now on. Again for the same, it watches what is there now.
    pub(super) fn add(&self, path: &Path, told: &Arc<Notify>) -> io::Result<()> {
        let flags = WatchFlags::MOVED_TO
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW;
        // Locked first, so that no news come before it is known whom they are for.
        let mut watches = locked(&self.watches);
        let watch = inotify::add_watch(self.fd.get_ref().as_fd(), path, flags)?;
        let all = watches.entry(watch).or_default();
        if !all.iter().any(|other| Arc::ptr_eq(other, told)) {
            all.push(Arc::clone(told));
        }
        Ok(())
    }

    /// Tells no more.
    pub(super) fn forget(&self, told: &Arc<Notify>) {
        locked(&self.watches).retain(|watch, all| {
            all.retain(|other| !Arc::ptr_eq(other, told));
            if all.is_empty() {
                // It may be gone with its directory.
                let _ = inotify::remove_watch(self.fd.get_ref().as_fd(), *watch);
            }
            !all.is_empty()
        });
    }
}

async fn read(fd: Arc<AsyncFd<OwnedFd>>, watches: Watches) {
    let mut buffer = [MaybeUninit::uninit(); 4 << 10];
    loop {
        let Ok(mut ready) = fd.readable().await else { return };
        let mut reader = inotify::Reader::new(fd.get_ref().as_fd(), &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => tell(&watches, event.wd(), event.events()),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => break,
                Err(error) => {
                    tracing::error!(%error, "volumes are not watched any more; they are still compared from time to time");
                    return;
                }
            }
        }
        ready.clear_ready();
    }
}

fn tell(watches: &Watches, watch: i32, events: ReadFlags) {
    let mut watches = locked(watches);
    if events.contains(ReadFlags::QUEUE_OVERFLOW) {
        watches.values().flatten().for_each(|told| told.notify_one());
    }
    if let Some(all) = watches.get(&watch) {
        all.iter().for_each(|told| told.notify_one());
    }
    if events.contains(ReadFlags::IGNORED) {
        watches.remove(&watch);
    }
}

fn locked(watches: &Watches) -> MutexGuard<'_, HashMap<i32, Vec<Arc<Notify>>>> {
    watches.lock().unwrap_or_else(PoisonError::into_inner)
}
