//! Root of a cell's mount namespace: the node's root file system with only the mounts that the cell
//! needs. So a cell keeps no other file system busy, and the node can unmount it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use kiyot_link::bootstrap::{CellFile, GatewayAddress};
use kiyot_linux::mountinfo::{self, Mount};
use rustix::{
    mount::{UnmountFlags, mount_bind, unmount},
    process::{chdir, pivot_root},
};

use super::mount_error::MountError;
use crate::dirs::CellDir;

/// Mounts at or below these paths are kept: they are the kernel's file systems, and programs,
/// libraries and configuration, which a distribution may have on separate file systems.
const SYSTEM_MOUNTS: [&str; 12] = [
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc", "/nix", "/gnu", "/dev",
    "/sys",
];
/// The cell mounts its own file systems here.
const REPLACED_MOUNTS: [&str; 2] = ["/proc", "/run"];
/// Programs that containerd runs beside the configured ones.
const CONTAINERD_HELPERS: [&str; 4] = ["containerd-shim-runc-v2", "unpigz", "igzip", "zstd"];
/// Upper bound on the links followed to a program, as in the kernel (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Reads the mounts of the mount namespace.
pub fn mount_table() -> Result<Vec<Mount>, MountError> {
    mountinfo::read()
        .map_err(|source| MountError::new("read the mount table", mountinfo::path(), source))
}

/// Returns the paths that a cell needs, with all links on the way: its directory, the gateway's
/// socket, its programs, the directories of `PATH`, and the registry configuration.
pub fn needed_paths(dir: &CellDir, file: &CellFile, path: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut needed_paths = BTreeSet::new();
    let mut add = |path: &Path| follow(path, &mut needed_paths);
    add(dir.path());
    if let GatewayAddress::Unix(socket) = &file.bootstrap.gateway {
        add(socket);
    }
    file.registry_config_dir.iter().for_each(|dir| add(dir));
    let extra = CONTAINERD_HELPERS.map(PathBuf::from);
    for program in [&file.containerd, &file.runc].into_iter().chain(&extra) {
        // A bare name is looked up in `PATH`; `join` with an absolute path ignores the directory.
        path.iter().for_each(|dir| add(&dir.join(program)));
        // containerd prefers a shim in its own directory.
        if let Some(parent) = program.parent().filter(|_| program.is_absolute()) {
            add(parent);
        }
    }
    if let Ok(program) = fs::read_link("/proc/self/exe") {
        add(&program);
    }
    needed_paths
}

/// Adds a path as written, its target, and each link on the way.
fn follow(path: &Path, to: &mut BTreeSet<PathBuf>) {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        to.insert(path.clone());
        to.extend(path.canonicalize());
        // The parent directory may be reached by links too.
        let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
        let Some(parent) = parent else { return };
        let Ok(target) = fs::read_link(&path) else { return };
        path = parent.join(target);
    }
}

/// Returns the mount points that a cell keeps, parents first.
fn kept_mounts(mounts: &[Mount], needed_paths: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let is_kept = |mount: &&Mount| {
        let point = &mount.point;
        let system = SYSTEM_MOUNTS.iter().any(|dir| point.starts_with(dir)) && mount.kind != "nsfs";
        let leads = needed_paths.iter().any(|path| path.starts_with(point));
        point != Path::new("/")
            && !REPLACED_MOUNTS.iter().any(|own| point.starts_with(own))
            && (system || leads)
    };
    let mut points: Vec<_> = mounts.iter().filter(is_kept).map(|mount| &mount.point).collect();
    points.sort_by_key(|point| (point.components().count(), *point));
    points.dedup();
    points.into_iter().cloned().collect()
}

/// Moves all processes of this mount namespace to the cell's root, and detaches the old root.
/// Propagation must be off.
pub fn enter(
    dir: &CellDir,
    mounts: &[Mount],
    needed_paths: &BTreeSet<PathBuf>,
) -> Result<(), MountError> {
    let root = dir.root();
    let failed = |what| {
        let path = root.clone();
        move |error: rustix::io::Errno| MountError::new(what, &path, error.into())
    };
    // Not recursive: mounts below the root are added one by one.
    mount_bind("/", &root).map_err(failed("bind-mount the node's root file system"))?;
    for point in kept_mounts(mounts, needed_paths) {
        let Ok(relative) = point.strip_prefix("/") else { continue };
        match mount_bind(&point, root.join(relative)) {
            // A later mount hides this mount point.
            Ok(()) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
            Err(error) => {
                return Err(MountError::new("bind-mount", &point, error.into()));
            }
        }
    }
    chdir(&root).map_err(failed("change to the new root"))?;
    // The old root is stacked on the new one (pivot_root(2), "pivot_root(".", ".")").
    pivot_root(".", ".").map_err(failed("pivot to the new root"))?;
    unmount(".", UnmountFlags::DETACH).map_err(failed("detach the old root"))?;
    chdir("/").map_err(failed("change to the root"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &[u8] = b"\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
24 23 0:4 net:[1] /run/netns/a\\040b rw shared:3 - nsfs nsfs rw
40 22 0:60 / /data/x rw - ext4 /dev/vdd rw
39 22 0:60 / /data rw - ext4 /dev/vdc rw
23 22 0:21 / /run rw,nosuid shared:2 - tmpfs tmpfs rw
25 22 0:50 / /var/lib/kubelet/pods/1/volumes/kubernetes.io~secret/s rw - tmpfs tmpfs rw
28 22 0:52 / /var/lib/kubelet/plugins/kubernetes.io/csi/d/1/globalmount rw - ext4 /dev/loop0 rw
29 22 0:53 / /var rw - ext4 /dev/vdb rw
26 22 0:51 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw
30 22 0:21 / /sys rw - sysfs sysfs rw
31 22 0:54 / /usr rw - squashfs /dev/vde ro
31 22 0:54 / /usrlocal rw - squashfs /dev/vde ro
27 22 0:4 net:[2] /etc/ns rw - nsfs nsfs rw
33 22 0:54 / /proc/sys/fs/binfmt_misc rw - binfmt_misc none rw
34 22 0:55 / /usr rw - ext4 /dev/vdf ro
";

    fn mounts() -> Vec<Mount> {
        mountinfo::parse(NODE)
    }

    fn kept_for(needed_paths: &[&str]) -> Vec<String> {
        let needed_paths = needed_paths.iter().map(PathBuf::from).collect();
        kept_mounts(&mounts(), &needed_paths)
            .iter()
            .map(|point| point.display().to_string())
            .collect()
    }

    /// Verifies N17.
    #[test]
    fn unneeded_mounts_are_dropped() {
        assert_eq!(kept_for(&[]), ["/sys", "/usr", "/sys/fs/cgroup/cpu"]);
    }

    /// Verifies N17.
    #[test]
    fn mounts_above_needed_paths_are_kept_parents_first() {
        assert_eq!(
            kept_for(&["/var/lib/kiyot/cells/c", "/data/x/bin/containerd"]),
            ["/data", "/sys", "/usr", "/var", "/data/x", "/sys/fs/cgroup/cpu"]
        );
    }

    #[test]
    fn links_to_a_program_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        fs::create_dir_all(base.join("far/away")).unwrap();
        fs::write(base.join("far/away/program"), "").unwrap();
        std::os::unix::fs::symlink("far", base.join("near")).unwrap();
        std::os::unix::fs::symlink("near/away/program", base.join("program")).unwrap();
        let mut found = BTreeSet::new();
        follow(&base.join("program"), &mut found);
        let expected = ["far/away/program", "near/away/program", "program"];
        assert_eq!(found, expected.map(|path| base.join(path)).into());
        // A link to itself ends the search.
        std::os::unix::fs::symlink("loop", base.join("loop")).unwrap();
        follow(&base.join("loop"), &mut BTreeSet::new());
    }
}
