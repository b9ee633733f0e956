//! Regular files and symbolic links, written under a temporary name and renamed into place, or into
//! an existing file.

use std::sync::atomic::{AtomicU64, Ordering};

use kiyot_proto::cell::{Root, WriteFile};
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Mode, OFlags, ftruncate, openat, renameat, symlinkat, unlinkat},
    io::Errno,
};

use super::{FileError, RelPath, beneath, mode_of, set_owner_and_mode};

/// Prefix of the names of temporary files.
const TEMPORARY_PREFIX: &str = ".kiyot-unfinished-";

/// A file that is being written.
#[derive(Debug)]
pub struct FileWriter {
    root: Root,
    path: RelPath,
    file: OwnedFd,
    /// `None` for a file that is written in place.
    temporary: Option<TemporaryFile>,
}

/// Temporary name of a file. The file is removed unless it was renamed.
#[derive(Debug)]
struct TemporaryFile {
    parent: OwnedFd,
    name: String,
    renamed: bool,
}

impl FileWriter {
    pub(super) fn begin(
        dir: &OwnedFd,
        root: Root,
        path: RelPath,
        write: &WriteFile,
    ) -> Result<Self, FileError> {
        let mode = mode_of(write.mode, &path)?;
        if write.in_place
            && let Some(file) = beneath::open_regular(dir, &path, OFlags::WRONLY)?
        {
            ftruncate(&file, 0).map_err(FileError::io("truncate", &path))?;
            return Ok(Self { root, path, file, temporary: None });
        }
        let parent = beneath::parent(dir, &path)?;
        let name = temporary_name();
        remove_leftover(&parent, &name)
            .map_err(FileError::io("remove the temporary file of", &path))?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, name.as_str(), flags, Mode::RUSR | Mode::WUSR)
            .map_err(FileError::io("write", &path))?;
        let temporary = Some(TemporaryFile { parent, name, renamed: false });
        let writer = Self { root, path, file, temporary };
        set_owner_and_mode(&writer.file, &writer.path, write.uid, write.gid, mode)?;
        Ok(writer)
    }

    pub(super) fn is_for(&self, root: Root, path: &RelPath) -> bool {
        self.root == root && self.path == *path
    }

    pub(super) fn path(&self) -> &RelPath {
        &self.path
    }

    pub(super) fn write(&mut self, mut content: &[u8]) -> Result<(), FileError> {
        while !content.is_empty() {
            match rustix::io::write(&self.file, content) {
                Ok(length) => content = &content[length..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(FileError::io("write", &self.path)(error)),
            }
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<(), FileError> {
        let Some(TemporaryFile { parent, name, renamed }) = &mut self.temporary else {
            return Ok(());
        };
        renameat(&*parent, name.as_str(), &*parent, self.path.name())
            .map_err(FileError::io("rename into place", &self.path))?;
        *renamed = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = unlinkat(&self.parent, self.name.as_str(), AtFlags::empty());
        }
    }
}

pub(super) fn symlink(dir: &OwnedFd, path: &RelPath, target: &str) -> Result<(), FileError> {
    let parent = beneath::parent(dir, path)?;
    let name = temporary_name();
    remove_leftover(&parent, &name).map_err(FileError::io("remove the temporary file of", path))?;
    symlinkat(target, &parent, name.as_str()).map_err(FileError::io("create the link", path))?;
    renameat(&parent, name.as_str(), &parent, path.name()).map_err(|error| {
        let _ = unlinkat(&parent, name.as_str(), AtFlags::empty());
        FileError::io("rename into place the link", path)(error)
    })
}

/// Returns a temporary name that is unique in this run of the agent. The caller removes a file of
/// this name that an earlier run left behind.
fn temporary_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{TEMPORARY_PREFIX}{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn remove_leftover(parent: &OwnedFd, name: &str) -> Result<(), Errno> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => Err(error),
        _ => Ok(()),
    }
}
