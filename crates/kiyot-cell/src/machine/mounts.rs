//! Mounts of the machine: the kernel's file systems, the image's root, and the disk of the cell.

use std::{
    ffi::CStr,
    fs, io,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::own;
use rustix::{
    fs::Mode,
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_move},
    process::{chdir, chroot},
};

use super::CELL_DIR;
use crate::dirs::CellDir;

/// Mount point of the image's root in the initramfs.
const NEW_ROOT: &str = "/root";
/// File systems that the image's root may have.
const ROOT_FILE_SYSTEMS: [&str; 2] = ["squashfs", "erofs"];
/// Mounts that move from the initramfs to the image's root.
const MOVED: [&str; 3] = ["/dev", "/proc", "/sys"];
const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// A mount failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {what} on {path:?}")]
pub struct MountError {
    what: String,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn failed(what: impl Into<String>, path: impl Into<PathBuf>) -> impl FnOnce(Errno) -> MountError {
    let (what, path) = (what.into(), path.into());
    move |error| MountError { what, path, source: error.into() }
}

fn add(
    kind: &'static str,
    path: &str,
    flags: MountFlags,
    data: Option<&CStr>,
) -> Result<(), MountError> {
    match fs::create_dir_all(path) {
        // In a read-only root the mount point must already exist.
        Err(error) if error.kind() != io::ErrorKind::ReadOnlyFilesystem => {
            return Err(MountError { what: kind.to_owned(), path: path.into(), source: error });
        }
        Ok(()) | Err(_) => {}
    }
    match mount(kind, path, kind, flags, data) {
        // The kernel has mounted it before.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(failed(kind, path)(error)),
    }
}

/// Mounts the kernel's file systems in the initramfs.
pub(super) fn early() -> Result<(), MountError> {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    add("devtmpfs", "/dev", MountFlags::NOSUID, Some(c"mode=0755"))?;
    add("proc", "/proc", PLAIN | MountFlags::NOEXEC, None)?;
    add("sysfs", "/sys", PLAIN | MountFlags::NOEXEC, None)
}

/// Makes the image's root the root of all processes, with the disk of the cell on its directory.
pub(super) fn root(image: &Path, disk: &Path) -> Result<(), MountError> {
    let mounted = |kind: &str| {
        mount(image, NEW_ROOT, kind, MountFlags::RDONLY | MountFlags::NODEV, None).is_ok()
    };
    if !ROOT_FILE_SYSTEMS.into_iter().any(mounted) {
        return Err(failed(format!("{} as {ROOT_FILE_SYSTEMS:?}", image.display()), NEW_ROOT)(
            Errno::INVAL,
        ));
    }
    let cell = own(Path::new(NEW_ROOT), CELL_DIR.trim_start_matches('/'));
    mount(disk, &cell, "ext4", PLAIN | MountFlags::NOATIME, None)
        .map_err(failed(disk.display().to_string(), &cell))?;
    for path in MOVED {
        let target = format!("{NEW_ROOT}{path}");
        mount_move(path, &target).map_err(failed(path, target))?;
    }
    // The initramfs can't be left by pivot_root(2).
    chdir(NEW_ROOT).map_err(failed("the root", NEW_ROOT))?;
    mount_move(".", "/").map_err(failed("the root", "/"))?;
    chroot(".").and_then(|()| chdir("/")).map_err(failed("the root", "/"))
}

/// Mounts the file systems of the running machine and of its cell.
pub(super) fn cell(dir: &CellDir) -> Result<(), MountError> {
    add("tmpfs", "/run", PLAIN, Some(c"mode=0755"))?;
    add("tmpfs", "/tmp", PLAIN, Some(c"mode=1777"))?;
    add(
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        Some(c"mode=0620,gid=5,ptmxmode=0666"),
    )?;
    add("tmpfs", "/dev/shm", PLAIN, Some(c"mode=1777"))?;
    add("mqueue", "/dev/mqueue", PLAIN | MountFlags::NOEXEC, None)?;
    add("cgroup2", "/sys/fs/cgroup", PLAIN | MountFlags::NOEXEC, None)?;
    add("securityfs", "/sys/kernel/security", PLAIN | MountFlags::NOEXEC, None)?;
    private(dir)
}

/// Mounts a tmpfs on the directory of volumes that hold secrets, and makes all mounts shared.
pub(crate) fn private(dir: &CellDir) -> Result<(), MountError> {
    let memory = dir.memory();
    mount("tmpfs", &memory, "tmpfs", PLAIN, c"mode=0755").map_err(failed("tmpfs", &memory))?;
    // Containers may request mount propagation, which needs shared mounts in the cell.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(failed("shared mounts", "/"))
}
