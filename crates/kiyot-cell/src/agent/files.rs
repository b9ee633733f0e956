//! File operations on the pod's directories, strictly below `pod_dir` and `memory_dir`. No path
//! component may be a symbolic link.

mod beneath;
mod mount_point;
mod mounts;
mod tree;
mod write;

use std::{io, path::Path};

use kiyot_linux::tree::PathError;
pub use kiyot_linux::tree::RelPath;
use kiyot_proto::cell::{FileChange, GetFileReply, GetFileRequest, Root, file_change::Change};
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, renameat, statat},
    io::Errno,
};
use tonic::Status;

pub use write::FileWriter;

/// Upper bound on the content in a `GetFile` reply, in bytes.
pub const MAX_GET_FILE_BYTES: u32 = 8 * 1024 * 1024;

/// Errors of a file operation.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The path is invalid.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A value is out of range.
    #[error("{path:?}: {what} {value}: out of range; allowed: {allowed}")]
    Value {
        /// Path of the file.
        path: String,
        /// Name of the value.
        what: &'static str,
        /// The rejected value.
        value: String,
        /// Allowed values.
        allowed: &'static str,
    },
    /// The change is invalid for this file, or out of sequence.
    #[error("{path:?}: {why}")]
    Rejected {
        /// Path of the file.
        path: String,
        /// Reason for the rejection.
        why: &'static str,
    },
    /// A system call failed.
    #[error("cannot {what} {path:?}")]
    Io {
        /// The operation, as a verb.
        what: &'static str,
        /// Path of the file.
        path: String,
        /// The error of the system call.
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
        let message = crate::with_sources(&error);
        match error {
            FileError::Path(_) | FileError::Value { .. } | FileError::Rejected { .. } => {
                Self::invalid_argument(message)
            }
            FileError::Io { source, .. } => match Errno::from_io_error(&source) {
                Some(Errno::NOENT) => Self::not_found(message),
                Some(Errno::LOOP | Errno::XDEV | Errno::ACCESS | Errno::PERM) => {
                    Self::permission_denied(message)
                }
                Some(Errno::NOSPC | Errno::DQUOT) => Self::resource_exhausted(message),
                Some(
                    Errno::NOTDIR | Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY | Errno::BUSY,
                ) => Self::failed_precondition(message),
                _ => Self::internal(message),
            },
        }
    }
}

/// The two directories below which the daemon may change files.
#[derive(Debug)]
pub struct Files {
    pod: OwnedFd,
    memory: OwnedFd,
}

impl Files {
    /// Opens both directories.
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

    /// Applies a change. `writer` keeps a file that several changes write, from one call to the
    /// next.
    pub fn apply(
        &self,
        change: FileChange,
        writer: &mut Option<FileWriter>,
    ) -> Result<(), FileError> {
        let path = RelPath::parse(&change.path)?;
        let root = root_of(change.root, &path)?;
        let dir = self.root(root);
        let Some(change) = change.change else {
            return Err(FileError::Rejected { path: path.to_string(), why: "the change is empty" });
        };
        if let Change::Append(content) = change {
            let Some(mut file) = writer.take().filter(|file| file.is_for(root, &path)) else {
                return Err(FileError::Rejected {
                    path: path.to_string(),
                    why: "append without a preceding write of the same file with \"more\"",
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
                why: "another change before the last part of the file",
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

    /// Reads a regular file up to the requested limit and [`MAX_GET_FILE_BYTES`]. An absent file is
    /// reported in the reply; any other file type is an error.
    pub fn get(&self, request: &GetFileRequest) -> Result<GetFileReply, FileError> {
        let path = RelPath::parse(&request.path)?;
        let dir = self.root(root_of(request.root, &path)?);
        let Some(file) = self.open_regular(dir, &path)? else {
            return Ok(GetFileReply::default());
        };
        let limit = request.limit.min(MAX_GET_FILE_BYTES) as usize;
        let from = if request.last {
            length(&file).map_err(FileError::io("stat", &path))?.saturating_sub(limit as u64)
        } else {
            0
        };
        let content = beneath::read(&file, from, limit).map_err(FileError::io("read", &path))?;
        Ok(GetFileReply { content: content.into(), exists: true })
    }

    /// Opens a regular file below `pod_dir` for reading, or for reading and writing. Returns `None`
    /// if it is absent.
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

/// Validates a mode's permission bits.
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

/// Sets owner and mode of an open file. The owner comes first, as chown(2) clears the setuid bits.
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
    rustix::fs::fchown(file, Some(uid), Some(gid)).map_err(FileError::io("chown", path))?;
    rustix::fs::fchmod(file, mode).map_err(FileError::io("chmod", path))
}

/// Returns whether the name exists, with any file type.
fn exists(dir: &OwnedFd, path: &RelPath) -> Result<bool, FileError> {
    match statat(dir, path.name(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(FileError::io("stat", path)(error)),
    }
}

/// Returns the length of an open file, in bytes.
pub fn length(file: &OwnedFd) -> Result<u64, Errno> {
    fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
}

/// Reads at most `limit` bytes from a position.
pub fn read_at(file: &OwnedFd, position: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    beneath::read(file, position, limit)
}

#[cfg(test)]
mod tests;
