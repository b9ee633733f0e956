//! Mounts of a cell: the node's mounts that it keeps, and its own.

use std::{
    env,
    ffi::CStr,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use kiyot_link::bootstrap::CellFile;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use super::{containerd::Snapshotter, mount_error::MountError, private, root};
use crate::dirs::CellDir;

/// Sets up the cell's mounts: the node's mounts that the cell needs, a new /proc, and a private
/// tmpfs each on /run, on /dev/shm, on the memory directory, and for containerd and agent. Must be
/// called in a private mount namespace. Returns the snapshotter that works on the cell's disk.
pub fn prepare(dir: &CellDir, file: &CellFile) -> Result<Snapshotter, MountError> {
    let resolver = ResolvConf::read();
    let path: Vec<_> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    let mounts = root::mount_table()?;
    root::enter(dir, &mounts, &root::needed_paths(dir, file, &path))?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    add("proc", Path::new("/proc"), plain | MountFlags::NOEXEC, None)?;
    add("tmpfs", Path::new("/run"), plain, Some(c"mode=0755"))?;
    if Path::new("/dev/shm").is_dir() {
        add("tmpfs", Path::new("/dev/shm"), plain, Some(c"mode=1777"))?;
    }
    // The directory below a tmpfs of the node may be read-only.
    let tmp = Path::new("/tmp");
    if mounts.iter().any(|mount| mount.point == tmp) && !dir.path().starts_with(tmp) {
        add("tmpfs", tmp, plain, Some(c"mode=1777"))?;
    }
    add("tmpfs", &dir.memory(), plain, Some(c"mode=0755"))?;
    let snapshotter = private::mount_all(dir)?;
    resolver
        .restore()
        .map_err(|source| MountError::new("restore resolv.conf", Path::new("/run"), source))?;
    // Containers may request mount propagation, which needs shared mounts in the cell.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(|error| MountError::new("make the mounts shared", Path::new("/"), error.into()))?;
    Ok(snapshotter)
}

fn add(
    what: &'static str,
    path: &Path,
    flags: MountFlags,
    data: Option<&CStr>,
) -> Result<(), MountError> {
    mount(what, path, what, flags, data)
        .map_err(|error| MountError::new(format!("mount {what}"), path, error.into()))
}

/// Target and content of /etc/resolv.conf if it links into /run, which the cell replaces.
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
