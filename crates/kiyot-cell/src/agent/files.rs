//! Files of the pod: written and read strictly beneath `pod_dir` and `memory_dir`, without
//! following a link on the way.

mod beneath;
mod mount_point;
mod mounts;
mod tree;
mod write;

use std::{io, path::Path};

use kiyot_proto::cell::{FileChange, GetFileReply, GetFileRequest, Root, file_change::Change};
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, renameat, statat},
    io::Errno,
};
use tonic::Status;

pub use beneath::RelPath;
pub use write::FileWriter;

/// The most that `GetFile` answers, in bytes.
pub const MAX_GET_FILE_BYTES: u32 = 8 * 1024 * 1024;

/// Why a file was not changed or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A path that is none of ours.
    #[error("the path {0:?}: allowed is a relative path without \".\", \"..\" or empty parts, of {max} bytes at most", max = beneath::MAX_PATH_BYTES)]
    Path(String),
    /// A value that has no meaning.
    #[error("{path:?}: {what} {value}: allowed is {allowed}")]
    Value {
        /// For which file.
        path: String,
        /// Which value.
        what: &'static str,
        /// It.
        value: String,
        /// What would do.
        allowed: &'static str,
    },
    /// A step that makes no sense after the one before.
    #[error("{path:?}: {why}")]
    Rejected {
        /// For which file.
        path: String,
        /// Why not.
        why: &'static str,
    },
    /// The file system refused.
    #[error("cannot {what} {path:?}")]
    Io {
        /// What was to be done.
        what: &'static str,
        /// For which file.
        path: String,
        /// Why not.
        source: io::Error,
    },
}

impl FileError {
    fn io(what: &'static str, path: impl ToString) -> impl FnOnce(Errno) -> Self {
        let path = path.to_string();
        move |error| Self::Io { what, path, source: error.into() }
    }
}

impl From<FileError> for Status {
    fn from(error: FileError) -> Self {
        let words = crate::with_sources(&error);
        match error {
            FileError::Path(_) | FileError::Value { .. } | FileError::Rejected { .. } => {
                Self::invalid_argument(words)
            }
            FileError::Io { source, .. } => match Errno::from_io_error(&source) {
                Some(Errno::NOENT) => Self::not_found(words),
                Some(Errno::LOOP | Errno::XDEV | Errno::ACCESS | Errno::PERM) => {
                    Self::permission_denied(words)
                }
                Some(Errno::NOSPC | Errno::DQUOT) => Self::resource_exhausted(words),
                Some(
                    Errno::NOTDIR | Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY | Errno::BUSY,
                ) => Self::failed_precondition(words),
                _ => Self::internal(words),
            },
        }
    }
}

/// The two directories beneath which the daemon may have files changed.
#[derive(Debug)]
pub struct Files {
    pod: OwnedFd,
    memory: OwnedFd,
}

impl Files {
    /// Opens both.
    pub fn open(pod: &Path, memory: &Path) -> io::Result<Self> {
        let open = |path: &Path| {
            openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        };
        Ok(Self { pod: open(pod)?, memory: open(memory)? })
    }

    fn root(&self, root: Root) -> &OwnedFd {
        match root {
            Root::Pod => &self.pod,
            Root::Memory => &self.memory,
        }
    }

    /// Applies one change. `writer` is the file that is being written over several changes, kept
    /// between the calls.
    pub fn apply(
        &self,
        change: FileChange,
        writer: &mut Option<FileWriter>,
    ) -> Result<(), FileError> {
        let path = RelPath::parse(&change.path)?;
        let root = root_of(change.root, &path)?;
        let dir = self.root(root);
        let Some(change) = change.change else {
            return Err(FileError::Rejected {
                path: path.to_string(),
                why: "the change says nothing",
            });
        };
        if let Change::Append(content) = change {
            let Some(mut file) = writer.take().filter(|file| file.is_for(root, &path)) else {
                return Err(FileError::Rejected {
                    path: path.to_string(),
                    why: "append follows a write of the same file that says \"more\"",
                });
            };
            if content.is_empty() {
                return file.finish();
            }
            file.write(&content)?;
            *writer = Some(file);
            return Ok(());
        }
        if let Some(temporary_name) = writer.take() {
            return Err(FileError::Rejected {
                path: temporary_name.path().to_string(),
                why: "another change came before its last part",
            });
        }
        match change {
            Change::MakeDir(make) => tree::make_dir(dir, &path, &make),
            Change::WriteFile(write) => {
                let mut file = FileWriter::begin(dir, root, path, &write)?;
                file.write(&write.content)?;
                if write.more {
                    *writer = Some(file);
                    return Ok(());
                }
                file.finish()
            }
            Change::Symlink(target) => write::symlink(dir, &path, &target),
            Change::RenameTo(to) => {
                let to = RelPath::parse(&to)?;
                let (from_dir, to_dir) = (beneath::parent(dir, &path)?, beneath::parent(dir, &to)?);
                renameat(&from_dir, path.name(), &to_dir, to.name())
                    .map_err(FileError::io("rename", &path))
            }
            Change::Remove(true) => tree::remove(dir, &path),
            Change::Remove(false) => Ok(()),
            Change::MountTmpfs(tmpfs) => mounts::tmpfs(dir, &path, &tmpfs),
            Change::Bind(source) => mounts::bind(dir, &RelPath::parse(&source)?, &path),
            Change::Append(_) => Ok(()),
        }
    }

    /// Reads a regular file, as much of it as is wanted and allowed. What is not there does not
    /// exist; what is no regular file is an error.
    pub fn get(&self, request: &GetFileRequest) -> Result<GetFileReply, FileError> {
        let path = RelPath::parse(&request.path)?;
        let dir = self.root(root_of(request.root, &path)?);
        let Some(file) = self.open_regular(dir, &path)? else {
            return Ok(GetFileReply::default());
        };
        let limit = request.limit.min(MAX_GET_FILE_BYTES) as usize;
        let from = if request.last {
            length(&file).map_err(FileError::io("look at", &path))?.saturating_sub(limit as u64)
        } else {
            0
        };
        let content = beneath::read(&file, from, limit).map_err(FileError::io("read", &path))?;
        Ok(GetFileReply { content: content.into(), exists: true })
    }

    /// Opens a regular file beneath `pod_dir` for reading, or for reading and writer.
    pub fn open_pod_file(&self, path: &RelPath, write: bool) -> Result<Option<OwnedFd>, FileError> {
        if write {
            beneath::open_regular(&self.pod, path, OFlags::RDWR)
        } else {
            self.open_regular(&self.pod, path)
        }
    }

    fn open_regular(&self, dir: &OwnedFd, path: &RelPath) -> Result<Option<OwnedFd>, FileError> {
        beneath::open_regular(dir, path, OFlags::RDONLY)
    }
}

fn root_of(root: i32, path: &RelPath) -> Result<Root, FileError> {
    Root::try_from(root).map_err(|error| FileError::Value {
        path: path.to_string(),
        what: "root",
        value: error.0.to_string(),
        allowed: "POD (0) or MEMORY (1)",
    })
}

/// A mode's permission bits.
fn mode_of(mode: u32, path: &RelPath) -> Result<Mode, FileError> {
    if mode > 0o7777 {
        return Err(FileError::Value {
            path: path.to_string(),
            what: "mode",
            value: format!("{mode:o}"),
            allowed: "0 to 7777 (octal)",
        });
    }
    Ok(Mode::from_raw_mode(mode))
}

/// Gives an open file exactly this owner and mode (the owner first: a change of it takes away the
/// setuid bits).
fn set_owner_and_mode(
    file: &OwnedFd,
    path: &RelPath,
    uid: u32,
    gid: u32,
    mode: Mode,
) -> Result<(), FileError> {
    let id = |what, id: u32| {
        if id == u32::MAX {
            return Err(FileError::Value {
                path: path.to_string(),
                what,
                value: id.to_string(),
                allowed: "less than 4294967295",
            });
        }
        Ok(id)
    };
    let (uid, gid) =
        (rustix::fs::Uid::from_raw(id("uid", uid)?), rustix::fs::Gid::from_raw(id("gid", gid)?));
    rustix::fs::fchown(file, Some(uid), Some(gid))
        .map_err(FileError::io("give an owner to", path))?;
    rustix::fs::fchmod(file, mode).map_err(FileError::io("give a mode to", path))
}

/// Whether there is something of this name, whatever it is.
fn exists(dir: &OwnedFd, path: &RelPath) -> Result<bool, FileError> {
    match statat(dir, path.name(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(FileError::io("look at", path)(error)),
    }
}

/// The length of an open file, in bytes.
pub fn length(file: &OwnedFd) -> Result<u64, Errno> {
    fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
}

/// Reads from a position, `limit` bytes at most.
pub fn read_at(file: &OwnedFd, position: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    beneath::read(file, position, limit)
}

#[cfg(test)]
mod tests;
