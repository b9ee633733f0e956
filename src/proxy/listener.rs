//! The CRI socket.

use std::{
    fs, io,
    os::unix::{fs::FileTypeExt, fs::MetadataExt, net::UnixListener},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, chmodat},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// The socket can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Something answers there.
    #[error("{} is in use: another process listens there", .0.display())]
    InUse(PathBuf),
    /// What is there is no socket, and not ours to remove.
    #[error("{} is in the way: it is not a socket; allowed is a path where there is nothing, or a socket that nobody listens on", .0.display())]
    NotASocket(PathBuf),
    /// A step failed.
    #[error("can't {step} {}", path.display())]
    Io {
        /// What was tried.
        step: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// The bound socket, removed on drop if it is still there.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: UnixListener,
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

/// Binds a socket that its owner alone can use. A stale one is replaced, a live one is not.
pub(super) fn listen_on(path: &Path) -> Result<Listener, ListenError> {
    let failed = |step, path: &Path| {
        let path = path.to_path_buf();
        move |source: io::Error| ListenError::Io { step, path, source }
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed("make the directory", parent))?;
    }
    remove_stale(path)?;
    let bound = || -> io::Result<UnixListener> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Nobody can connect before `listen`, so there is no time at which others could.
        chmodat(CWD, path, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
        listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    };
    let socket = bound().map_err(failed("listen on", path))?;
    Ok(Listener { socket, path: path.into(), inode: inode(path) })
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
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
        // AGAIN: the other's queue is full.
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(rustix::io::Errno::CONNREFUSED) => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove the stale socket")(error))
            }
            _ => Ok(()),
        },
        Err(error) => Err(failed("see whether a process listens on")(error.into())),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon may have taken the path since.
        if self.inode.is_some() && self.inode == inode(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_socket_is_its_owners_alone_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/on/the/way/cri.sock");
        let listener = listen_on(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        drop(UnixListener::bind(&path).unwrap());
        let listener = listen_on(&path).unwrap();
        let refused = listen_on(&path).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("{} is in use: another process listens there", path.display())
        );
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
    }

    #[test]
    fn what_is_not_a_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen_on(&path), Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_successors_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cri.sock");
        let listener = listen_on(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let successor = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(successor);
    }
}
