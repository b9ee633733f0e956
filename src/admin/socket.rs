//! Socket of the admin API: in a directory of its own, which is open to a group. Clients dial a
//! link to the socket.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, symlink},
    path::{Path, PathBuf},
};

use kiyot_config::Admin;
use nix::unistd::Group;
use rustix::{
    fs::{CWD, Gid, Mode, OFlags, fchmod, fchown, fstat, openat},
    process::{getegid, geteuid},
};

use crate::unix_listener::{self, ListenError, Listener};

/// A socket that can't be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    /// The socket can't be bound, or a stale socket can't be removed.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The socket's directory is another user's.
    #[error("directory {} belongs to user {user}; allowed: an absent path, or one of this user",
        .directory.display())]
    NotOwn { directory: PathBuf, user: u32 },
    /// The path of the link leads to another target.
    #[error("{} leads to {}; allowed: an absent path, or a link to {}",
        .link.display(), .target.display(), .wanted.display())]
    OtherLink { link: PathBuf, target: PathBuf, wanted: PathBuf },
    /// A step failed.
    #[error("can't {step} {}", path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
}

/// The open socket. Dropping it removes the link and the socket.
#[derive(Debug)]
pub(super) struct Socket {
    _link: Link,
    pub(super) listener: Listener,
}

impl Socket {
    /// Opens the socket. Blocking: the lookup of the group may use the network.
    pub(super) fn open(config: &Admin) -> Result<Self, SocketError> {
        let group = config.group.as_deref().and_then(group);
        let path = config.socket();
        make_directory(path.parent().unwrap_or(&path), group)?;
        let listener = unix_listener::listen_on(&path, group)?;
        let link = Link::make(&config.listen, &path)?;
        if let Some(group) = group
            && let Some((directory, mode)) = closed_directory(&config.listen, group)
        {
            tracing::warn!(
                directory = %directory.display(),
                mode = format_args!("{mode:04o}"),
                "members of admin.group can't reach the socket, allowed: a directory that they \
                 may pass, such as one of mode 0711 (RuntimeDirectoryMode of the unit)"
            );
        }
        Ok(Self { _link: link, listener })
    }
}

/// Returns the id of a group; `None` and a log line if the group is unknown.
fn group(name: &str) -> Option<Gid> {
    match Group::from_name(name) {
        Ok(Some(group)) => return Some(Gid::from_raw(group.gid.as_raw())),
        Ok(None) => {
            tracing::error!(group = name, "group of admin.group is unknown, only root may read");
        }
        Err(error) => tracing::error!(group = name, %error, "group of admin.group not read"),
    }
    None
}

/// Makes the socket's directory, or sets the rights of a directory from a previous run. A group can
/// pass and list it; without a group, only this user can.
fn make_directory(directory: &Path, group: Option<Gid>) -> Result<(), SocketError> {
    let failed =
        |step| move |source: io::Error| SocketError::Io { step, path: directory.into(), source };
    if let Some(parent) = directory.parent() {
        fs::create_dir_all(parent).map_err(failed("make the parent of"))?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed("make the directory")(error));
        }
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = openat(CWD, directory, flags, Mode::empty()).map_err(io::Error::from);
    let opened = opened.map_err(failed("open the directory"))?;
    let user = fstat(&opened).map_err(|error| failed("look at")(error.into()))?.st_uid;
    if user != geteuid().as_raw() {
        return Err(SocketError::NotOwn { directory: directory.into(), user });
    }
    let mode = if group.is_some() { Mode::RWXU | Mode::RGRP | Mode::XGRP } else { Mode::RWXU };
    fchown(&opened, None, Some(group.unwrap_or_else(getegid)))
        .and_then(|()| fchmod(&opened, mode))
        .map_err(|error| failed("set the rights of")(error.into()))
}

/// The link to a socket, at the path that clients dial. Dropping this removes the link.
#[derive(Debug)]
struct Link {
    path: PathBuf,
    target: PathBuf,
}

impl Link {
    /// Makes the link. Replaces a link of a previous run and a stale socket of an earlier version.
    fn make(path: &Path, socket: &Path) -> Result<Self, SocketError> {
        let failed = |step| move |source| SocketError::Io { step, path: path.into(), source };
        let parent = path.parent().unwrap_or_else(|| Path::new("/"));
        let wanted = socket.strip_prefix(parent).unwrap_or(socket);
        let made = Self { path: path.into(), target: wanted.into() };
        match fs::read_link(path) {
            Ok(target) if target == wanted => return Ok(made),
            Ok(target) => {
                let (link, wanted) = (path.into(), wanted.into());
                return Err(SocketError::OtherLink { link, target, wanted });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => unix_listener::remove_stale(path)?,
        }
        symlink(wanted, path).map_err(failed("make the link"))?;
        Ok(made)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Another daemon may have replaced the link.
        if fs::read_link(&self.path).is_ok_and(|target| target == self.target) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns the nearest directory on the way to a path through which a group's members can't pass,
/// and its mode.
fn closed_directory(path: &Path, group: Gid) -> Option<(PathBuf, u32)> {
    path.ancestors().skip(1).find_map(|directory| {
        let found = fs::metadata(directory).ok()?;
        let needed = if found.gid() == group.as_raw() { 0o010 } else { 0o001 };
        (found.mode() & needed == 0).then(|| (directory.to_owned(), found.mode() & 0o7777))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    };

    use super::*;

    fn config(directory: &Path) -> Admin {
        Admin { listen: directory.join("admin.sock"), group: None }
    }

    #[test]
    fn link_leads_to_a_socket_in_a_directory_of_its_own_and_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir.path().join("made/on/the/way"));
        let socket = Socket::open(&config).unwrap();
        let directory = config.listen.with_extension("sock.d");
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::read_link(&config.listen).unwrap(), Path::new("admin.sock.d/socket"));
        UnixStream::connect(&config.listen).unwrap();
        let refused = Socket::open(&config).unwrap_err().to_string();
        assert!(refused.contains("admin.sock.d/socket is in use"), "{refused}");
        drop(socket);
        assert!(fs::symlink_metadata(&config.listen).is_err());
    }

    #[test]
    fn link_of_a_killed_daemon_and_a_stale_socket_of_an_earlier_version_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        drop(UnixListener::bind(&config.listen).unwrap());
        std::mem::forget(Socket::open(&config).unwrap().listener);
        fs::remove_file(config.socket()).unwrap();
        drop(UnixListener::bind(config.socket()).unwrap());
        symlink("admin.sock.d/socket", &config.listen).unwrap();
        let _socket = Socket::open(&config).unwrap();
        UnixStream::connect(&config.listen).unwrap();
    }

    #[test]
    fn other_file_link_or_live_socket_at_the_path_stays() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let refused = || Socket::open(&config).unwrap_err().to_string();
        fs::write(&config.listen, "precious").unwrap();
        assert!(refused().contains("is not a socket"), "{}", refused());
        fs::remove_file(&config.listen).unwrap();
        symlink("elsewhere", &config.listen).unwrap();
        assert!(refused().contains("leads to elsewhere; allowed"), "{}", refused());
        fs::remove_file(&config.listen).unwrap();
        let _live = UnixListener::bind(&config.listen).unwrap();
        assert!(refused().contains("is in use"), "{}", refused());
    }

    #[test]
    fn directory_that_the_group_can_not_pass_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (inner, group) = (dir.path().join("run"), Gid::from_raw(65_533));
        fs::create_dir(&inner).unwrap();
        let closed = |mode, within| {
            fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).unwrap();
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(within)).unwrap();
            closed_directory(&inner.join("admin.sock"), group)
        };
        assert_eq!(closed(0o700, 0o711), Some((inner.clone(), 0o700)));
        assert_eq!(closed(0o711, 0o700), Some((dir.path().to_owned(), 0o700)));
        let beyond = closed(0o711, 0o711).map(|(directory, _)| directory);
        assert!(beyond.is_none_or(|directory| !directory.starts_with(dir.path())));
    }
}
