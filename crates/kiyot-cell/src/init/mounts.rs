//! The mounts of a cell: what it keeps of the node's, and what it has for itself.

use std::{
    env,
    ffi::CStr,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use kiyot_link::bootstrap::CellFile;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use super::root;
use crate::dirs::CellDir;

/// Bounds what the metadata of the cell's containerd takes of its memory: a record of some hundred
/// bytes for each blob, snapshot and container of one pod.
const METADATA_TMPFS_OPTIONS: &CStr = c"mode=0700,size=256m";

/// Why a mount was not made.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {what} on {path:?}")]
pub struct MountError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl MountError {
    pub(super) fn new(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self { what, path: path.to_owned(), source }
    }
}

/// Gives the cell its mounts: of the node's what it needs; its own /proc; private tmpfs on /run,
/// /dev/shm, the memory directory and, as they hold the pod's environment variables, containerd's
/// metadata. The mount namespace is private already.
pub fn prepare(dir: &CellDir, file: &CellFile) -> Result<(), MountError> {
    let resolver = ResolvConf::read();
    let path: Vec<_> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    let mounts = root::mount_table()?;
    root::enter(dir, &mounts, &root::needed(dir, file, &path))?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    add("proc", Path::new("/proc"), plain | MountFlags::NOEXEC, None)?;
    add("tmpfs", Path::new("/run"), plain, Some(c"mode=0755"))?;
    if Path::new("/dev/shm").is_dir() {
        add("tmpfs", Path::new("/dev/shm"), plain, Some(c"mode=1777"))?;
    }
    // What is beneath a node's own tmpfs may be read-only.
    let tmp = Path::new("/tmp");
    if mounts.iter().any(|mount| mount.point == tmp) && !dir.path().starts_with(tmp) {
        add("tmpfs", tmp, plain, Some(c"mode=1777"))?;
    }
    add("tmpfs", &dir.memory(), plain, Some(c"mode=0755"))?;
    add("tmpfs", &dir.containerd_metadata(), plain, Some(METADATA_TMPFS_OPTIONS))?;
    resolver.restore().map_err(|source| {
        MountError::new("the resolver's configuration", Path::new("/run"), source)
    })?;
    // Within the cell mounts are shared: containers may ask for their propagation.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(|error| MountError::new("all as shared", Path::new("/"), error.into()))
}

fn add(
    what: &'static str,
    path: &Path,
    flags: MountFlags,
    data: Option<&CStr>,
) -> Result<(), MountError> {
    mount(what, path, what, flags, data).map_err(|error| MountError::new(what, path, error.into()))
}

/// /etc/resolv.conf where it is a link into /run: what it leads to must stay.
#[derive(Debug)]
struct ResolvConf(Option<(PathBuf, Vec<u8>)>);

impl ResolvConf {
    fn read() -> Self {
        let real =
            fs::canonicalize("/etc/resolv.conf").ok().filter(|real| real.starts_with("/run"));
        Self(real.and_then(|real| fs::read(&real).ok().map(|content| (real, content))))
    }

    fn restore(self) -> io::Result<()> {
        let Some((path, content)) = self.0 else { return Ok(()) };
        if let Some(parent) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
        }
        fs::write(path, content)
    }
}
