//! Removes the directories of ended instances in the background.
//!
//! A pod decides how many files it leaves, so that its end can't wait for their removal. A
//! directory that is not removed within [`IMMEDIATE_TIMEOUT`] is moved aside, and is removed in
//! parts, in turns with other directories. A file that can't be removed does not delay the end
//! either. The next daemon continues: the directory itself is the record.

use std::{
    ffi::{CString, OsStr, OsString},
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

use kiyot_linux::tree::{MountPolicy, RemoveProgress, beneath, remove};
use rustix::{
    fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with},
    io::Errno,
};
use tokio::task::spawn_blocking;
use tokio_util::task::AbortOnDropHandle;

use crate::instance::Home;

/// Bounds the time for which the end of an instance waits for the removal of its directory.
const IMMEDIATE_TIMEOUT: Duration = Duration::from_secs(3);
/// Bounds the entries that a step removes, and with them the time for which a step uses a thread.
const MAX_STEP_ENTRIES: usize = 1000;
/// Bounds the directories that are removed in turns.
const TURNS: usize = 64;
/// The pause after a failed removal.
const RETRY: Duration = Duration::from_secs(60);
/// Bounds the pending directories with the same name.
const MAX_SAME_NAME: u32 = 1000;

/// Removes the directories of ended instances. Its background task ends with it.
#[derive(Debug)]
pub(super) struct Removal {
    /// The parent of the directories that are moved aside.
    dir: PathBuf,
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

impl Removal {
    /// Returns a removal that moves directories to `dir`. Has no side effects.
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, task: Mutex::default() }
    }

    /// Creates the parent directory early, because a full disk prevents it later.
    pub(super) fn prepare(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)
    }

    /// Removes an instance's directory, or moves the rest of it aside. After `Ok` the directory
    /// does not belong to the instance any more.
    pub(super) async fn remove(&self, home: &Home) -> io::Result<()> {
        let until = Instant::now() + IMMEDIATE_TIMEOUT;
        let why = loop {
            match step(home.dir().to_owned()).await {
                Ok(RemoveProgress::Done) => return Ok(()),
                Ok(RemoveProgress::Partial) if Instant::now() < until => {}
                Ok(RemoveProgress::Partial) => break None,
                Err(error) => break Some(error),
            }
        };
        self.prepare()?;
        let (from, dir) = (home.dir().to_owned(), self.dir.clone());
        spawn_blocking(move || move_aside(&from, &dir)).await.map_err(io::Error::other)??;
        if let Some(error) = why {
            tracing::warn!(
                cell = home.cell(),
                %error,
                dir = %self.dir.display(),
                "removal of an ended cell's files failed, will be retried"
            );
        } else {
            tracing::info!(
                cell = home.cell(),
                dir = %self.dir.display(),
                "removal of an ended cell's files continues in the background"
            );
        }
        self.wake();
        Ok(())
    }

    /// Starts the background task, unless it runs.
    pub(super) fn wake(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            *task = Some(AbortOnDropHandle::new(tokio::spawn(work(self.dir.clone()))));
        }
    }
}

/// Removes the entries of a directory, in turns.
async fn work(dir: PathBuf) {
    loop {
        let listed = dir.clone();
        let names = match spawn_blocking(move || list(&listed)).await {
            Ok(Ok(names)) if !names.is_empty() => names,
            Ok(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, dir = %dir.display(), "files of ended cells not listed");
                return;
            }
            _ => return,
        };
        let mut goes_on = false;
        for name in names {
            match removed_part(&dir, &name).await {
                Ok(RemoveProgress::Partial) => goes_on = true,
                Ok(RemoveProgress::Done) => {
                    tracing::info!(?name, "files of an ended cell removed");
                    goes_on = true;
                }
                Err(error) => {
                    tracing::warn!(?name, %error, "files of an ended cell not removed");
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

async fn removed_part(dir: &Path, name: &OsStr) -> io::Result<RemoveProgress> {
    step(beneath(dir, name)?).await
}

/// Removes a part of a tree on a blocking thread.
async fn step(path: PathBuf) -> io::Result<RemoveProgress> {
    let removed = spawn_blocking(move || -> io::Result<RemoveProgress> {
        let (parent, name) = parts(&path)?;
        let parent = match openat(CWD, parent, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(RemoveProgress::Done),
            parent => parent?,
        };
        Ok(remove(parent, &name, MountPolicy::Refuse, MAX_STEP_ENTRIES)?)
    });
    removed.await.map_err(io::Error::other)?
}

fn parts(path: &Path) -> io::Result<(&Path, CString)> {
    let name = path.file_name().map(|name| CString::new(name.as_bytes()));
    match (path.parent(), name) {
        (Some(parent), Some(Ok(name))) => Ok((parent, name)),
        _ => Err(io::Error::other(format!("{} has no file name", path.display()))),
    }
}

/// Moves a directory into another under an unused name.
fn move_aside(from: &Path, dir: &Path) -> io::Result<()> {
    let name = from.file_name().unwrap_or_default();
    for number in 0..MAX_SAME_NAME {
        let mut to = name.as_bytes().to_vec();
        to.extend_from_slice(format!(".{number}").as_bytes());
        let to = beneath(dir, OsString::from_vec(to))?;
        match renameat_with(CWD, from, CWD, &to, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            // Another call has removed it.
            Err(Errno::NOENT) if !from.try_exists()? => return Ok(()),
            moved => return Ok(moved?),
        }
    }
    Err(io::Error::other(format!("{MAX_SAME_NAME} directories of {name:?} wait to be removed")))
}
