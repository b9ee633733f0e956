//! The mounts of a cell: what it has for itself, and what it must not keep of the host's.

use std::{
    ffi::CStr,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};

use crate::dirs::CellDir;

/// Why a mount was not made.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {what} on {path:?}")]
pub struct MountError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Gives the cell its mounts: its own /proc, private tmpfs on /run, /dev/shm and the memory
/// directory. The mount namespace is private already.
pub fn prepare(dir: &CellDir) -> Result<(), MountError> {
    let resolver = Resolver::read();
    for path in
        fs::read_to_string("/proc/self/mountinfo").map(|table| foreign(&table)).unwrap_or_default()
    {
        // One that is busy or gone does no harm.
        let _ = unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    add("proc", Path::new("/proc"), plain | MountFlags::NOEXEC, None)?;
    add("tmpfs", Path::new("/run"), plain, Some(c"mode=0755"))?;
    if Path::new("/dev/shm").is_dir() {
        add("tmpfs", Path::new("/dev/shm"), plain, Some(c"mode=1777"))?;
    }
    add("tmpfs", &dir.memory(), plain, Some(c"mode=0755"))?;
    resolver.restore().map_err(|source| MountError {
        what: "the resolver's configuration",
        path: PathBuf::from("/run"),
        source,
    })?;
    // Within the cell mounts are shared: containers may ask for their propagation.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC).map_err(|error| {
        MountError { what: "all as shared", path: PathBuf::from("/"), source: error.into() }
    })
}

fn add(
    what: &'static str,
    path: &Path,
    flags: MountFlags,
    data: Option<&CStr>,
) -> Result<(), MountError> {
    mount(what, path, what, flags, data).map_err(|error| MountError {
        what,
        path: path.to_owned(),
        source: error.into(),
    })
}

/// Mounts of the host that a cell would only keep alive: those under /run, which it covers, name
/// space files, and volumes of the node's pods. The last mounted comes first.
fn foreign(mountinfo: &str) -> Vec<PathBuf> {
    let mut paths: Vec<_> = mountinfo
        .lines()
        .filter_map(|line| {
            let path = unescape(line.split(' ').nth(4)?);
            let kind = line.split(" - ").nth(1)?.split(' ').next()?;
            let of_a_pod =
                path.contains("/volumes/kubernetes.io~") || path.contains("/volume-subpaths/");
            (path.starts_with("/run/") || kind == "nsfs" || of_a_pod).then(|| PathBuf::from(path))
        })
        .collect();
    paths.reverse();
    paths
}

/// Undoes the octal escapes of /proc/self/mountinfo.
fn unescape(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (from, to)| path.replace(from, to))
}

/// /etc/resolv.conf where it is a link into /run: what it leads to must stay.
#[derive(Debug)]
struct Resolver(Option<(PathBuf, Vec<u8>)>);

impl Resolver {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_s_mounts_that_a_cell_must_not_keep_are_found() {
        let table = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:21 / /run rw,nosuid shared:2 - tmpfs tmpfs rw
24 23 0:4 net:[1] /run/netns/a\\040b rw shared:3 - nsfs nsfs rw
25 22 0:50 / /var/lib/kubelet/pods/1/volumes/kubernetes.io~secret/s rw - tmpfs tmpfs rw
26 22 0:51 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw
27 22 0:4 net:[2] /var/ns rw - nsfs nsfs rw";
        let expected =
            ["/var/ns", "/var/lib/kubelet/pods/1/volumes/kubernetes.io~secret/s", "/run/netns/a b"];
        assert_eq!(foreign(table), expected.map(PathBuf::from));
    }
}
