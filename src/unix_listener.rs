//! Listening unix sockets. A killed daemon leaves their paths behind.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{AtFlags, CWD, FlockOperation, Gid, Mode, OFlags, chmodat, chownat, flock},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};

/// Bound on connections that wait to be accepted.
const MAX_BACKLOG: i32 = 1024;
/// Extension that a socket's name gets for the name of its lock.
const LOCK_EXTENSION: &str = "lock";
/// Mode of a lock. Every user who can open the file can lock it.
const LOCK_MODE: u32 = 0o600;
/// Time for which a start waits for the lock. Another start holds it for a moment only.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A socket that can't be bound.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens on the socket.
    #[error("{} is in use: another process listens there", .0.display())]
    InUse(PathBuf),
    /// Another process keeps the socket's lock.
    #[error(
        "{} is locked: another process kept its lock for {waited:?}; allowed: a file whose lock \
         (flock) no process keeps",
        path.display()
    )]
    Locked {
        /// The file.
        path: PathBuf,
        /// The time spent waiting for the lock.
        waited: Duration,
    },
    /// The path has a file that is not a socket. The file is not removed.
    #[error(
        "{} is not a socket; allowed: an absent path, or a socket without a listener",
        .0.display()
    )]
    NotASocket(PathBuf),
    /// A step failed.
    #[error("can't {step} {}", path.display())]
    Io {
        /// The failed step, as a verb.
        step: &'static str,
        /// The object of the step.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Bound socket. Dropping it removes its path, unless another socket has replaced it there.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

/// Binds a socket with mode 0600, or with mode 0660 for a group. A stale socket is replaced; a live
/// socket is an error.
pub(crate) fn listen_on(path: &Path, group: Option<Gid>) -> Result<Listener, ListenError> {
    listen_within(path, group, LOCK_TIMEOUT)
}

/// Binds a socket as [`listen_on`] does, with another time limit for the lock.
fn listen_within(
    path: &Path,
    group: Option<Gid>,
    lock_timeout: Duration,
) -> Result<Listener, ListenError> {
    let failed = |step, path: &Path| {
        let path = path.to_path_buf();
        move |source: io::Error| ListenError::Io { step, path, source }
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed("make the directory", parent))?;
    }
    let _lock = lock(path, lock_timeout)?;
    remove_stale(path)?;
    let bound = || -> io::Result<UnixListener> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Before `listen` connections are refused, so that the wider mode of `bind` admits no peer.
        let mut mode = Mode::RUSR | Mode::WUSR;
        if group.is_some() {
            chownat(CWD, path, None, group, AtFlags::empty())?;
            mode |= Mode::RGRP | Mode::WGRP;
        }
        chmodat(CWD, path, mode, AtFlags::empty())?;
        listen(&socket, MAX_BACKLOG)?;
        Ok(UnixListener::from(socket))
    };
    let socket = bound().map_err(failed("listen on", path))?;
    Ok(Listener { socket, path: path.into(), inode: inode(path) })
}

/// Locks the file beside a socket. Without the lock, a concurrent start could treat the socket as
/// stale between `bind` and `listen`. The file stays. `None` if its file system has no locks.
fn lock(socket: &Path, timeout: Duration) -> Result<Option<File>, ListenError> {
    let path = socket.with_added_extension(LOCK_EXTENSION);
    // With NONBLOCK the open of a FIFO without a reader fails at once.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(LOCK_MODE).custom_flags(flags);
    let failed = |step| {
        let path = path.clone();
        move |source| ListenError::Io { step, path, source }
    };
    let file = options.open(&path).map_err(failed("open"))?;
    let own = fs::Permissions::from_mode(LOCK_MODE);
    file.set_permissions(own).map_err(failed("set the mode of"))?;
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(rustix::io::Errno::AGAIN) if begun.elapsed() >= timeout => {
                return Err(ListenError::Locked { path, waited: timeout });
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => thread::sleep(LOCK_PAUSE),
            Err(_) => return Ok(None),
        }
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Removes a socket without a listener.
pub(crate) fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |step| move |source| ListenError::Io { step, path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at")(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.into()));
        }
        Ok(_) => {}
    }
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|error| failed("open a socket to look at")(error.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|error| failed("look at")(error.into()))?;
    match rustix::net::connect(&socket, &address) {
        // AGAIN: the backlog of the listener is full.
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(rustix::io::Errno::CONNREFUSED) => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove the stale socket")(error))
            }
            _ => Ok(()),
        },
        Err(error) => Err(failed("connect to")(error.into())),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon may have replaced the socket.
        if self.inode.is_some() && self.inode == inode(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_has_mode_0600_and_is_removed_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/on/the/way/cri.sock");
        let listener = listen_on(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn stale_socket_is_replaced_and_a_live_socket_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        drop(UnixListener::bind(&path).unwrap());
        let listener = listen_on(&path, None).unwrap();
        let refused = listen_on(&path, None).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("{} is in use: another process listens there", path.display())
        );
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
    }

    #[test]
    fn socket_goes_to_one_of_two_concurrent_starts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        for _ in 0..500 {
            drop(UnixListener::bind(&path).unwrap());
            let begin = std::sync::Barrier::new(2);
            let start = || {
                begin.wait();
                listen_on(&path, None)
            };
            let results: [_; 2] = thread::scope(|scope| {
                [(); 2].map(|()| scope.spawn(start)).map(|started| started.join().unwrap())
            });
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
            std::os::unix::net::UnixStream::connect(&path).unwrap();
        }
    }

    #[test]
    fn socket_is_not_replaced_while_another_process_keeps_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        drop(UnixListener::bind(&path).unwrap());
        let (stale, locked) = (inode(&path), lock(&path, LOCK_TIMEOUT).unwrap());
        assert!(stale.is_some() && locked.is_some());
        let refused = listen_within(&path, None, Duration::from_millis(1)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!(
                "{}.lock is locked: another process kept its lock for 1ms; allowed: a file whose \
                 lock (flock) no process keeps",
                path.display()
            )
        );
        assert_eq!(inode(&path), stale);
        drop(locked);
        listen_on(&path, None).unwrap();
    }

    /// Verifies X50.
    #[test]
    fn lock_of_the_directory_does_not_delay_a_socket_and_its_own_lock_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let (path, own) = (dir.path().join("cri.sock"), dir.path().join("cri.sock.lock"));
        let directory = File::open(dir.path()).unwrap();
        flock(&directory, FlockOperation::LockExclusive).unwrap();
        fs::write(&own, "").unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o644)).unwrap();
        drop(listen_within(&path, None, Duration::ZERO).unwrap());
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o7777, 0o600);
    }

    /// Verifies X50.
    #[test]
    fn link_or_fifo_in_place_of_the_lock_is_an_error_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, lock) = (dir.path().join("cri.sock"), dir.path().join("cri.sock.lock"));
        std::os::unix::fs::symlink(dir.path().join("other"), &lock).unwrap();
        let refused = || listen_on(&path, None).unwrap_err().to_string();
        let expected = format!("can't open {}", lock.display());
        assert_eq!(refused(), expected);
        fs::remove_file(&lock).unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, &lock, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(refused(), expected);
        assert!(!path.exists());
    }

    #[test]
    fn file_in_place_of_the_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen_on(&path, None), Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn socket_of_another_daemon_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        let listener = listen_on(&path, None).unwrap();
        fs::remove_file(&path).unwrap();
        let successor = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(successor);
    }
}
