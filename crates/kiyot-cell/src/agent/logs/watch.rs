//! Watches the log directory by inotify, and publishes the sizes of logs.

use std::{io, mem::MaybeUninit, path::Path, path::PathBuf, sync::Arc, time::Duration};

use rustix::{
    fd::OwnedFd,
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{LOG_DIR, MAX_DEPTH, sizes};
use crate::agent::state::CellState;

/// Delay in which further changes are collected before the sizes are published.
const DEBOUNCE: Duration = Duration::from_millis(2);
/// Upper bound on watched directories.
const MAX_WATCHED_DIRS: usize = 256;
/// Interval between scans if the directory can't be watched.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Publishes the sizes of logs as they change. Never returns.
pub async fn follow(state: Arc<CellState>, pod_dir: PathBuf) {
    loop {
        if let Err(error) = watch(&state, &pod_dir).await {
            tracing::warn!(%error, "log directory not watched, falling back to polling");
        }
        publish_sizes(&state, &pod_dir).await;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[expect(
    deprecated,
    reason = "its replacement is unsafe; an OwnedFd has the I/O safety that it asks for"
)]
async fn watch(state: &Arc<CellState>, pod_dir: &Path) -> io::Result<()> {
    let handle = AsyncFd::with_interest(
        inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
        Interest::READABLE,
    )?;
    let mut dirs = 0;
    add(handle.get_ref(), &pod_dir.join(LOG_DIR), 0, &mut dirs)?;
    loop {
        publish_sizes(state, pod_dir).await;
        let mut ready = handle.readable().await?;
        let changes = drain(handle.get_ref())?;
        ready.clear_ready();
        drop(ready);
        // Events before clear_ready cause no further wake-up.
        let more = drain(handle.get_ref())?;
        if changes.dirs || more.dirs {
            // inotify_add_watch(2) on a watched directory returns the existing watch.
            dirs = 0;
            add(handle.get_ref(), &pod_dir.join(LOG_DIR), 0, &mut dirs)?;
        }
        if changes.lost || more.lost {
            return Err(io::Error::other("log directory deleted"));
        }
        tokio::time::sleep(DEBOUNCE).await;
    }
}

async fn publish_sizes(state: &Arc<CellState>, pod_dir: &Path) {
    let (state, pod_dir) = (Arc::clone(state), pod_dir.to_owned());
    // Fails only if the runtime ends.
    let _ = tokio::task::spawn_blocking(move || state.set_logs(sizes(&pod_dir))).await;
}

/// Watches a directory and its subdirectories.
fn add(handle: &OwnedFd, dir: &Path, depth: usize, dirs: &mut usize) -> io::Result<()> {
    if *dirs == MAX_WATCHED_DIRS {
        return Ok(());
    }
    let what = WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF;
    inotify::add_watch(handle, dir, what | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW)?;
    *dirs += 1;
    if depth == MAX_DEPTH {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            match add(handle, &entry.path(), depth + 1, dirs) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Changes {
    /// A directory was created, or the queue overflowed.
    dirs: bool,
    /// The log directory was deleted.
    lost: bool,
}

/// Reads all queued events.
fn drain(handle: &OwnedFd) -> io::Result<Changes> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(handle, &mut buffer);
    let mut changes = Changes::default();
    loop {
        match reader.next() {
            Ok(event) => {
                changes.dirs |=
                    event.events().intersects(ReadFlags::ISDIR | ReadFlags::QUEUE_OVERFLOW);
                // The first watch descriptor is that of the log directory.
                changes.lost |= event.wd() == 1 && event.events().contains(ReadFlags::DELETE_SELF);
            }
            Err(Errno::AGAIN) => return Ok(changes),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use kiyot_proto::cell::event::Event as Kind;

    use super::*;

    /// Waits until the state contains a log with this size.
    async fn until(state: &CellState, path: &str, size: u64) {
        let mut versions = state.subscribe();
        let grown = async {
            loop {
                versions.borrow_and_update();
                if let Some((events, _)) = state.events_since(None)
                    && let Some(Kind::Snapshot(snapshot)) = &events[0].event
                    && snapshot.logs.iter().any(|log| log.path == path && log.size == size)
                {
                    return;
                }
                versions.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(60), grown).await.unwrap();
    }

    #[tokio::test]
    async fn log_growth_in_new_directories_is_published() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir(temp.path().join(LOG_DIR)).unwrap();
        let state = Arc::new(CellState::default());
        state.set_pods(vec![], vec![]);
        let _task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(follow(
            Arc::clone(&state),
            temp.path().to_owned(),
        )));
        std::fs::create_dir_all(temp.path().join("logs/c")).unwrap();
        let mut log = std::fs::File::create(temp.path().join("logs/c/0.log")).unwrap();
        log.write_all(b"abc").unwrap();
        until(&state, "logs/c/0.log", 3).await;
        log.write_all(b"def").unwrap();
        until(&state, "logs/c/0.log", 6).await;
        std::fs::write(temp.path().join("logs/other"), "x").unwrap();
        until(&state, "logs/other", 1).await;
    }
}
