//! Removal of the directories of ended instances, off to the side.
//!
//! A pod decides how many files it leaves, so that its end may not wait for their removal: what is
//! not removed in a moment is moved to a directory of its own, and removed there a part at a time,
//! in turns with what other instances have left. A file that can't be removed keeps no instance
//! from its end either. What a daemon leaves, the next one goes on with: the directory itself is
//! the record.

use std::{
    ffi::{CString, OsString},
    fs::{self, DirBuilder},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use kiyot_tree::{Mounts, Removed, remove};
use rustix::{
    fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with},
    io::Errno,
};
use tokio::task::spawn_blocking;
use tokio_util::task::AbortOnDropHandle;

use super::instance::Home;

/// How long the end of an instance waits for its directory's removal.
const AT_ONCE: Duration = Duration::from_secs(3);
/// Entries that one step removes: a thread is taken for no longer.
const STEP_ENTRIES: usize = 1000;
/// Directories that are removed in turns.
const TURNS: usize = 64;
/// How long to wait after something could not be removed.
const RETRY: Duration = Duration::from_secs(60);
/// Directories of one name that may wait to be removed.
const SAME_NAME: u32 = 1000;

/// Removes the directories of ended instances. What it does in the background ends with it.
#[derive(Debug)]
pub(super) struct Removal {
    /// Directory to which those are moved that are not removed at once.
    dir: PathBuf,
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

impl Removal {
    /// A removal that moves directories to `dir`. Touches nothing.
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, task: Mutex::default() }
    }

    /// Makes the directory that others are moved to: when the disk is full it is too late.
    pub(super) fn prepare(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)
    }

    /// Removes an instance's directory, or what can be removed of it in a moment. When it returns
    /// `Ok`, the directory is not the instance's any more.
    pub(super) async fn remove(&self, home: &Home) -> io::Result<()> {
        let until = Instant::now() + AT_ONCE;
        let why = loop {
            match step(home.dir().to_owned()).await {
                Ok(Removed::All) => return Ok(()),
                Ok(Removed::Part) if Instant::now() < until => {}
                Ok(Removed::Part) => break None,
                Err(error) => break Some(error),
            }
        };
        self.prepare()?;
        let (from, dir) = (home.dir().to_owned(), self.dir.clone());
        spawn_blocking(move || move_aside(&from, &dir)).await.map_err(io::Error::other)??;
        if let Some(error) = why {
            tracing::warn!(cell = home.cell(), %error, dir = %self.dir.display(), "removal of an ended cell's files failed, and is tried again");
        } else {
            tracing::info!(cell = home.cell(), dir = %self.dir.display(), "removal of an ended cell's files goes on in the background");
        }
        self.wake();
        Ok(())
    }

    /// Goes on with what is to be removed, if nothing is being done about it.
    pub(super) fn wake(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            *task = Some(AbortOnDropHandle::new(tokio::spawn(work(self.dir.clone()))));
        }
    }
}

/// Removes all that is in a directory, in turns.
async fn work(dir: PathBuf) {
    loop {
        let listed = dir.clone();
        let names = match spawn_blocking(move || list(&listed)).await {
            Ok(Ok(names)) if !names.is_empty() => names,
            Ok(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, dir = %dir.display(), "files of ended cells can not be listed");
                return;
            }
            _ => return,
        };
        let mut goes_on = false;
        for name in names {
            match step(dir.join(&name)).await {
                Ok(Removed::Part) => goes_on = true,
                Ok(Removed::All) => {
                    tracing::info!(?name, "files of an ended cell removed");
                    goes_on = true;
                }
                Err(error) => {
                    tracing::warn!(?name, %error, "files of an ended cell can not be removed");
                }
            }
        }
        if !goes_on {
            tokio::time::sleep(RETRY).await;
        }
    }
}

fn list(dir: &Path) -> io::Result<Vec<OsString>> {
    fs::read_dir(dir)?.take(TURNS).map(|entry| entry.map(|entry| entry.file_name())).collect()
}

/// Removes a part of a tree, on a thread that may block.
async fn step(path: PathBuf) -> io::Result<Removed> {
    let removed = spawn_blocking(move || -> io::Result<Removed> {
        let (parent, name) = parts(&path)?;
        let parent = match openat(CWD, parent, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(Removed::All),
            parent => parent?,
        };
        Ok(remove(parent, &name, Mounts::Refuse, STEP_ENTRIES)?)
    });
    removed.await.map_err(io::Error::other)?
}

fn parts(path: &Path) -> io::Result<(&Path, CString)> {
    let name = path.file_name().map(|name| CString::new(name.as_bytes()));
    match (path.parent(), name) {
        (Some(parent), Some(Ok(name))) => Ok((parent, name)),
        _ => Err(io::Error::other(format!("{} has no name", path.display()))),
    }
}

/// Moves a directory into another one, under a name that is free there.
fn move_aside(from: &Path, dir: &Path) -> io::Result<()> {
    let name = from.file_name().unwrap_or_default();
    for number in 0..SAME_NAME {
        let mut to = name.as_bytes().to_vec();
        to.extend_from_slice(format!(".{number}").as_bytes());
        let to = dir.join(OsString::from_vec(to));
        match renameat_with(CWD, from, CWD, &to, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            // Removed by another call meanwhile.
            Err(Errno::NOENT) if !from.try_exists()? => return Ok(()),
            moved => return Ok(moved?),
        }
    }
    Err(io::Error::other(format!("{SAME_NAME} directories of {name:?} wait to be removed")))
}
