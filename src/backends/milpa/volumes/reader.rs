//! Bounded reads of volumes on the node, below a directory handle, following no link.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use bytes::Bytes;
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2,
        readlinkat, statat,
    },
    io::Errno,
};

use super::{
    plan::DATA_LINK,
    tree::{Attributes, Entry, Tree},
};

/// Most entries of a volume.
pub(super) const MAX_ENTRIES: usize = 10_000;

/// Most bytes of all files of a volume.
pub(super) const MAX_VOLUME_BYTES: u64 = 64 << 20;

/// Deepest nesting of directories.
const MAX_DEPTH: usize = 64;

/// Attempts to read a volume that changes meanwhile.
const MAX_READ_ATTEMPTS: usize = 5;

/// Error of reading a volume.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// A system call failed.
    #[error("{path:?} in it")]
    Io {
        /// Path in the volume.
        path: String,
        #[source]
        source: io::Error,
    },
    /// The volume exceeds a bound.
    #[error(
        "it has more than {MAX_ENTRIES} entries, {MAX_VOLUME_BYTES} bytes, or {MAX_DEPTH} \
         nested directories"
    )]
    TooMuch,
    /// A socket, a device, or a name that is not UTF-8.
    #[error("{0:?} in it is {1}; allowed are files, directories and links with UTF-8 names")]
    Unsupported(String, &'static str),
    /// The kubelet hasn't written or mounted it yet, which doesn't mean that it is empty.
    #[error("the kubelet has not written it: {0}")]
    Unknown(&'static str),
}

impl ReadError {
    /// Returns whether the volume is temporarily absent: the kubelet will write it.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unknown(_) => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::TooMuch | Self::Unsupported(..) => false,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileOrTree {
    /// A regular file.
    File(Attributes, Bytes),
    /// A directory with its entries.
    Tree(Tree),
}

/// Reads a volume that the kubelet publishes by `..data`. Returns a state that was complete at one
/// moment, without entries of other updates.
pub(super) fn read_atomic(path: &Path) -> Result<Tree, ReadError> {
    let mut last = ReadError::Unknown("it changes all the time");
    for _ in 0..MAX_READ_ATTEMPTS {
        // Compares `..data` before and after the read: a directory to which it does not lead yet
        // may be half-written.
        let before = data_target(path);
        let tree = match read_tree(open_root(path, true)?) {
            Ok(tree) => tree,
            Err(error) if was_deleted(&error) => {
                last = error;
                continue;
            }
            Err(error) => return Err(error),
        };
        match published(tree) {
            Ok(tree) if before.as_deref() == data_in(&tree) && data_target(path) == before => {
                return Ok(tree);
            }
            Ok(_) => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Reads a file or a tree. With `no_follow`, its path must not end in a link.
pub(super) fn read_node(path: &Path, no_follow: bool) -> Result<FileOrTree, ReadError> {
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, no_follow);
    let node = openat(CWD, path, flags, Mode::empty()).map_err(|errno| at("", errno))?;
    let stat = fstat(&node).map_err(|errno| at("", errno))?;
    // Checked before it is opened, because opening a device has effects.
    let opened = |kind| {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | kind;
        let path = format!("/proc/self/fd/{}", node.as_raw_fd());
        openat(CWD, path, flags, Mode::empty()).map_err(|errno| at("", errno))
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => read_tree(opened(OFlags::DIRECTORY)?).map(FileOrTree::Tree),
        FileType::RegularFile => {
            let fd = opened(OFlags::empty())?;
            Ok(FileOrTree::File(attributes(&stat), content(fd, "", &mut MAX_VOLUME_BYTES.clone())?))
        }
        FileType::Symlink => Err(at("", Errno::LOOP)),
        _ => Err(ReadError::Unsupported(String::new(), "neither a file nor a directory")),
    }
}

/// Removes the entries of unfinished and previous updates.
fn published(mut tree: Tree) -> Result<Tree, ReadError> {
    let data = data_in(&tree).ok_or(ReadError::Unknown("it has no link ..data"))?.to_owned();
    if !data.starts_with("..")
        || data.contains('/')
        || !matches!(tree.entries.get(&data), Some(Entry::Dir(_)))
    {
        return Err(ReadError::Unknown("its link ..data leads to no directory in it"));
    }
    tree.entries.retain(|path, _| {
        let top = path.split('/').next().unwrap_or_default();
        !top.starts_with("..") || top == DATA_LINK || top == data
    });
    Ok(tree)
}

fn data_in(tree: &Tree) -> Option<&str> {
    match tree.entries.get(DATA_LINK) {
        Some(Entry::Link(target)) => Some(target),
        _ => None,
    }
}

/// Returns the current target of `..data`.
fn data_target(path: &Path) -> Option<String> {
    path.join(DATA_LINK).read_link().ok()?.into_os_string().into_string().ok()
}

fn open_root(path: &Path, no_follow: bool) -> Result<OwnedFd, ReadError> {
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
    flags.set(OFlags::NOFOLLOW, no_follow);
    openat(CWD, path, flags, Mode::empty()).map_err(|errno| at("", errno))
}

fn read_tree(root: OwnedFd) -> Result<Tree, ReadError> {
    let stat = fstat(&root).map_err(|errno| at("", errno))?;
    let mut walk = Walk { entries: BTreeMap::new(), bytes: MAX_VOLUME_BYTES };
    walk.directory(&root, "", 0)?;
    Ok(Tree { root: attributes(&stat), entries: walk.entries })
}

/// State of reading a tree.
struct Walk {
    entries: BTreeMap<String, Entry>,
    /// Remaining bytes.
    bytes: u64,
}

impl Walk {
    fn directory(&mut self, fd: &OwnedFd, path: &str, depth: usize) -> Result<(), ReadError> {
        if depth > MAX_DEPTH {
            return Err(ReadError::TooMuch);
        }
        for entry in Dir::read_from(fd).map_err(|errno| at(path, errno))? {
            let entry = entry.map_err(|errno| at(path, errno))?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            if self.entries.len() >= MAX_ENTRIES {
                return Err(ReadError::TooMuch);
            }
            let name = entry.file_name().to_str().map_err(|_| {
                ReadError::Unsupported(
                    entry.file_name().to_string_lossy().into_owned(),
                    "named in bytes that are not UTF-8",
                )
            })?;
            let below = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
            let read = self.entry(fd, name, &below, depth)?;
            self.entries.insert(below, read);
        }
        Ok(())
    }

    fn entry(
        &mut self,
        parent: &OwnedFd,
        name: &str,
        path: &str,
        depth: usize,
    ) -> Result<Entry, ReadError> {
        let stat =
            statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| at(path, errno))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                let target =
                    readlinkat(parent, name, Vec::new()).map_err(|errno| at(path, errno))?;
                target.into_string().map(Entry::Link).map_err(|_| {
                    ReadError::Unsupported(path.to_owned(), "a link to bytes that are not UTF-8")
                })
            }
            FileType::Directory => {
                let fd =
                    open_below(parent, name, OFlags::DIRECTORY).map_err(|errno| at(path, errno))?;
                let stat = fstat(&fd).map_err(|errno| at(path, errno))?;
                self.directory(&fd, path, depth + 1)?;
                Ok(Entry::Dir(attributes(&stat)))
            }
            FileType::RegularFile => {
                let fd =
                    open_below(parent, name, OFlags::NONBLOCK).map_err(|errno| at(path, errno))?;
                let stat = fstat(&fd).map_err(|errno| at(path, errno))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(ReadError::Unsupported(path.to_owned(), "no longer a file"));
                }
                Ok(Entry::File(attributes(&stat), content(fd, path, &mut self.bytes)?))
            }
            FileType::Socket => Err(ReadError::Unsupported(path.to_owned(), "a socket")),
            FileType::Fifo => Err(ReadError::Unsupported(path.to_owned(), "a pipe")),
            _ => Err(ReadError::Unsupported(path.to_owned(), "a device")),
        }
    }
}

fn open_below(parent: &OwnedFd, name: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    openat2(
        parent.as_fd(),
        name,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | flags,
        Mode::empty(),
        resolve,
    )
}

/// Reads a whole file and subtracts its length from the remaining bytes.
fn content(fd: OwnedFd, path: &str, left: &mut u64) -> Result<Bytes, ReadError> {
    let mut content = Vec::new();
    let read = File::from(fd)
        .take(*left + 1)
        .read_to_end(&mut content)
        .map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
    *left = left.checked_sub(read as u64).ok_or(ReadError::TooMuch)?;
    Ok(content.into())
}

fn attributes(stat: &rustix::fs::Stat) -> Attributes {
    Attributes { mode: stat.st_mode & 0o7777, uid: stat.st_uid, gid: stat.st_gid }
}

fn at(path: &str, errno: Errno) -> ReadError {
    ReadError::Io { path: path.to_owned(), source: errno.into() }
}

/// Returns whether an entry was deleted while it was read.
fn was_deleted(error: &ReadError) -> bool {
    matches!(
        error,
        ReadError::Io { path, source }
            if !path.is_empty() && source.kind() == io::ErrorKind::NotFound
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    /// Makes a volume as the kubelet writes it.
    fn volume(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("..v1")).unwrap();
        symlink("..v1", dir.path().join("..data")).unwrap();
        for (name, content) in files {
            fs::write(dir.path().join("..v1").join(name), content).unwrap();
            symlink(format!("..data/{name}"), dir.path().join(name)).unwrap();
        }
        dir
    }

    #[test]
    fn unfinished_update_is_not_read() {
        let dir = volume(&[("key", "value")]);
        fs::create_dir(dir.path().join("..v2")).unwrap();
        fs::write(dir.path().join("..v2/half"), "").unwrap();
        symlink("..v2", dir.path().join("..data_tmp")).unwrap();
        let tree = read_atomic(dir.path()).unwrap();
        assert_eq!(tree.entries.keys().collect::<Vec<_>>(), ["..data", "..v1", "..v1/key", "key"]);
        assert_eq!(tree.entries["key"], Entry::Link("..data/key".into()));
        assert!(matches!(&tree.entries["..v1/key"], Entry::File(_, content) if content == "value"));
    }

    #[test]
    fn unwritten_volume_is_unknown() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read_atomic(dir.path()), Err(ReadError::Unknown(_))));
        for target in ["..gone", "/etc", "../x", "plain"] {
            symlink(target, dir.path().join("..data")).unwrap();
            assert!(matches!(read_atomic(dir.path()), Err(ReadError::Unknown(_))), "{target}");
            fs::remove_file(dir.path().join("..data")).unwrap();
        }
        assert!(matches!(read_atomic(&dir.path().join("absent")), Err(ReadError::Io { .. })));
    }

    #[test]
    fn links_are_recorded_and_never_followed() {
        let dir = volume(&[]);
        symlink("/etc/passwd", dir.path().join("..v1/out")).unwrap();
        symlink("/etc", dir.path().join("dir")).unwrap();
        let tree = read_atomic(dir.path()).unwrap();
        assert_eq!(tree.entries["..v1/out"], Entry::Link("/etc/passwd".into()));
        assert_eq!(tree.entries["dir"], Entry::Link("/etc".into()));
        let link = dir.path().join("dir");
        assert!(read_node(&link, true).is_err());
    }

    #[test]
    fn sockets_and_pipes_are_refused() {
        let dir = volume(&[]);
        let _socket =
            std::os::unix::net::UnixListener::bind(dir.path().join("..v1/socket")).unwrap();
        assert!(matches!(read_atomic(dir.path()), Err(ReadError::Unsupported(..))));
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(matches!(read_node(&pipe, true), Err(ReadError::Unsupported(..))));
        // Opening this device without a terminal fails, so the error shows that it isn't opened.
        let device = read_node(Path::new("/dev/tty"), true);
        assert!(matches!(device, Err(ReadError::Unsupported(..))), "{device:?}");
    }

    #[test]
    fn volume_beyond_bounds_is_refused() {
        let dir = volume(&[]);
        let large = File::create(dir.path().join("..v1/large")).unwrap();
        large.set_len(MAX_VOLUME_BYTES + 1).unwrap();
        assert!(matches!(read_atomic(dir.path()), Err(ReadError::TooMuch)));
        large.set_len(0).unwrap();
        let mut deep = dir.path().join("..v1");
        for _ in 0..=MAX_DEPTH {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        assert!(matches!(read_atomic(dir.path()), Err(ReadError::TooMuch)));
    }

    #[test]
    fn file_path_reads_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("etc-hosts");
        fs::write(&file, "127.0.0.1 localhost\n").unwrap();
        assert!(matches!(
            read_node(&file, true),
            Ok(FileOrTree::File(_, content)) if content == "127.0.0.1 localhost\n"
        ));
    }

    #[test]
    fn changing_volume_is_read_in_one_state() {
        let dir = volume(&[("a", "0"), ("b", "0")]);
        let path = dir.path().to_owned();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let writer = std::thread::spawn(move || {
            let mut old = "..v1".to_owned();
            for version in 2_u64.. {
                if stopped.load(std::sync::atomic::Ordering::SeqCst) {
                    return;
                }
                let new = format!("..v{version}");
                fs::create_dir(path.join(&new)).unwrap();
                for name in ["a", "b"] {
                    fs::write(path.join(&new).join(name), version.to_string()).unwrap();
                }
                symlink(&new, path.join("..data_tmp")).unwrap();
                fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
                fs::remove_dir_all(path.join(old)).unwrap();
                old = new;
            }
        });
        let mut whole = 0;
        while whole < 100 {
            // Reading may give up, but a result is complete.
            let Ok(tree) = read_atomic(dir.path()) else { continue };
            whole += 1;
            let Entry::Link(data) = &tree.entries["..data"] else { panic!("no link") };
            let content = |name: &str| match &tree.entries[&format!("{data}/{name}")] {
                Entry::File(_, content) => content.clone(),
                other => panic!("{other:?}"),
            };
            assert_eq!(content("a"), content("b"));
        }
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        writer.join().unwrap();
    }
}
