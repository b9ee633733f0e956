//! Opening directories relative to others, and reading them in parts.

use std::{
    ffi::{CStr, CString},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, openat2, statat},
    io::Errno,
};

/// The bytes of a directory that are read at a time: some hundred names.
pub(crate) const READ_BYTES: usize = 8 << 10;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOATIME);

/// Opens a directory by its name in another directory.
///
/// Does not follow a symbolic link (`NOTDIR` or `LOOP`). Does not enter a mount point (`XDEV`).
pub fn open_dir(parent: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_XDEV
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS;
    open_with(parent, name, resolve)
}

/// Opens the current parent of an open directory.
pub fn open_parent(dir: impl AsFd) -> Result<OwnedFd, Errno> {
    open_with(dir, c"..", ResolveFlags::NO_XDEV)
}

fn open_with(parent: impl AsFd, name: &CStr, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    let mut flags = DIRECTORY;
    loop {
        match openat2(parent.as_fd(), name, flags, Mode::empty(), resolve) {
            // A rename happened meanwhile.
            Err(Errno::AGAIN | Errno::INTR) => {}
            // NOATIME requires the file's owner or CAP_FOWNER.
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => flags.remove(OFlags::NOATIME),
            opened => return opened,
        }
    }
}

/// Returns a path to an open file, for system calls that take a path.
pub(crate) fn proc_path(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Returns the name of the first subdirectory of an open directory.
pub fn first_subdirectory(dir: impl AsFd) -> Result<Option<CString>, Errno> {
    let mut found = None;
    read(&dir, 0, |entry| {
        if entry.is_directory(&dir) {
            found = Some(entry.name.to_owned());
        }
        Ok(found.is_none())
    })?;
    Ok(found)
}

/// A directory entry other than `.` and `..`.
#[derive(Debug)]
pub(crate) struct DirEntry<'a> {
    pub(crate) name: &'a CStr,
    kind: FileType,
    /// The directory's read position after the entry.
    pub(crate) next: u64,
}

impl DirEntry<'_> {
    /// Returns whether the entry is a directory. Calls `stat` only if `d_type` is unknown.
    pub(crate) fn is_directory(&self, dir: impl AsFd) -> bool {
        match self.kind {
            FileType::Unknown => statat(dir, self.name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
            kind => kind == FileType::Directory,
        }
    }
}

/// Reads a directory from a position until `each` returns `false`. Returns whether the end was
/// reached.
pub(crate) fn read(
    dir: impl AsFd,
    position: u64,
    mut each: impl FnMut(&DirEntry<'_>) -> Result<bool, Errno>,
) -> Result<bool, Errno> {
    rustix::fs::seek(dir.as_fd(), rustix::fs::SeekFrom::Start(position))?;
    let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
    let mut entries = RawDir::new(dir.as_fd(), &mut buffer);
    loop {
        let entry = match entries.next() {
            None => return Ok(true),
            // The directory itself was removed.
            Some(Err(Errno::NOENT)) => return Ok(true),
            Some(entry) => entry?,
        };
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let (kind, next) = (entry.file_type(), entry.next_entry_cookie());
        if !each(&DirEntry { name: entry.file_name(), kind, next })? {
            return Ok(false);
        }
    }
}
