//! Watches the log directory by inotify, and publishes the sizes of logs.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kiyot_linux::inotify::{Inotify, ReadFlags, WatchFlags};

use super::{MAX_DEPTH, sizes};
use crate::{agent::state::CellState, dirs::LOG_DIR};

/// Delay in which further changes are collected before the sizes are published.
const DEBOUNCE: Duration = Duration::from_millis(2);
/// Upper bound on watched directories.
const MAX_WATCHED_DIRS: usize = 256;
/// Watch descriptor of the log directory: the first of an inotify instance.
const LOG_DIR_WATCH: i32 = 1;
/// Interval between scans if the directory can't be watched.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Publishes the sizes of logs as they change. Never returns.
pub async fn follow(state: Arc<CellState>, pod_dir: PathBuf) {
    // Warns once: the console is bounded, and a warning at each scan would displace all other
    // lines.
    let mut is_polling = false;
    loop {
        if let Err(error) = watch(&state, &pod_dir, &mut is_polling).await
            && !std::mem::replace(&mut is_polling, true)
        {
            tracing::warn!(%error, "log directory not watched, falling back to polling");
        }
        publish_sizes(&state, &pod_dir).await;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Follows the directory while it can be watched. Polling ends meanwhile.
async fn watch(state: &Arc<CellState>, pod_dir: &Path, is_polling: &mut bool) -> io::Result<()> {
    let inotify = Inotify::new()?;
    let log_dir = pod_dir.join(LOG_DIR);
    add(&inotify, &log_dir, 0, &mut 0)?;
    if std::mem::take(is_polling) {
        tracing::info!("log directory watched again");
    }
    loop {
        publish_sizes(state, pod_dir).await;
        let (mut dirs_changed, mut log_dir_deleted) = (false, false);
        inotify
            .read(|watch, events| {
                dirs_changed |= events.intersects(ReadFlags::ISDIR | ReadFlags::QUEUE_OVERFLOW);
                log_dir_deleted |=
                    watch == LOG_DIR_WATCH && events.contains(ReadFlags::DELETE_SELF);
            })
            .await?;
        if dirs_changed {
            // A directory that is already watched keeps its watch.
            add(&inotify, &log_dir, 0, &mut 0)?;
        }
        if log_dir_deleted {
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
fn add(inotify: &Inotify, dir: &Path, depth: usize, dirs: &mut usize) -> io::Result<()> {
    if *dirs == MAX_WATCHED_DIRS {
        return Ok(());
    }
    let what = WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF;
    inotify.add(dir, what | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW)?;
    *dirs += 1;
    if depth == MAX_DEPTH {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            match add(inotify, &entry.path(), depth + 1, dirs) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
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

    #[tokio::test(start_paused = true)]
    async fn unwatchable_directory_and_its_recovery_are_logged_once() {
        let temp = tempfile::tempdir().unwrap();
        let log = kiyot_testkit::log::CapturedLog::start();
        let count = |words: &str| log.lines().iter().filter(|line| line.contains(words)).count();
        let state = Arc::new(CellState::default());
        state.set_pods(vec![], vec![]);
        let _task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(follow(
            Arc::clone(&state),
            temp.path().to_owned(),
        )));
        tokio::time::sleep(100 * POLL_INTERVAL).await;
        assert_eq!((count("falling back to polling"), count("watched again")), (1, 0));
        std::fs::create_dir(temp.path().join(LOG_DIR)).unwrap();
        std::fs::write(temp.path().join("logs/log"), "x").unwrap();
        until(&state, "logs/log", 1).await;
        tokio::time::sleep(100 * POLL_INTERVAL).await;
        assert_eq!((count("falling back to polling"), count("watched again")), (1, 1));
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
