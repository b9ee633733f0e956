//! Cgroup of a cell's own processes. The pod's containers are in the kubelet's cgroups.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::{RelPath, beneath, own};

/// Mount point of the cgroup file systems.
pub const ROOT: &str = "/sys/fs/cgroup";

/// Errors of joining a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The name is not a relative path of plain names.
    #[error("cgroup {0:?}: invalid; allowed: a relative path of plain names")]
    Name(String),
    /// A file of the cgroup can't be read or written.
    #[error("cgroup {0:?}")]
    Io(PathBuf, #[source] io::Error),
}

/// Creates the cgroup `name` if it is absent and moves this process into it: in the unified
/// hierarchy (v2), or in each v1 hierarchy and the v2 hierarchy beside them.
pub fn join(root: &Path, name: &str) -> Result<(), CgroupError> {
    let name = RelPath::parse(name).map_err(|_| CgroupError::Name(name.to_owned()))?;
    for hierarchy in hierarchies(root).map_err(|source| CgroupError::Io(root.to_owned(), source))? {
        let group = name.beneath(&hierarchy);
        join_group(&hierarchy, &name).map_err(|source| CgroupError::Io(group, source))?;
    }
    Ok(())
}

/// Returns the roots of the hierarchies: the unified one, or all of v1 (symbolic links to the same
/// hierarchy are skipped). In hybrid mode the v2 hierarchy has no controllers, but systemd tracks
/// the processes of a service by it.
fn hierarchies(root: &Path) -> io::Result<Vec<PathBuf>> {
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.to_owned()]);
    }
    let mut hierarchies = Vec::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.path().join("cgroup.procs").exists() {
            hierarchies.push(entry.path());
        }
    }
    Ok(hierarchies)
}

fn join_group(hierarchy: &Path, name: &RelPath) -> io::Result<()> {
    let mut group = hierarchy.to_owned();
    for part in name.as_str().split('/') {
        let parent = group.clone();
        group = beneath(&parent, part)?;
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // In v1 a new cpuset is empty, and joining it fails.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            inherit(&own(&parent, file), &own(&group, file))?;
        }
    }
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

fn inherit(from: &Path, to: &Path) -> io::Result<()> {
    match fs::read_to_string(to) {
        Ok(value) if value.trim().is_empty() => {
            fs::write(to, fs::read_to_string(from).unwrap_or_default().trim())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_name_leading_out_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        for name in ["", "/kiyot", "../kiyot", "kiyot/../..", "."] {
            assert!(matches!(join(root.path(), name), Err(CgroupError::Name(_))), "{name}");
        }
    }

    #[test]
    fn every_cgroup_hierarchy_is_found_once() {
        let root = tempfile::tempdir().unwrap();
        for hierarchy in ["cpu", "memory", "unified"] {
            fs::create_dir(root.path().join(hierarchy)).unwrap();
            fs::write(root.path().join(hierarchy).join("cgroup.procs"), "").unwrap();
        }
        fs::write(root.path().join("unified/cgroup.controllers"), "").unwrap();
        fs::create_dir(root.path().join("empty")).unwrap();
        std::os::unix::fs::symlink("cpu", root.path().join("cpuacct")).unwrap();
        let mut found = hierarchies(root.path()).unwrap();
        found.sort();
        assert_eq!(
            found,
            ["cpu", "memory", "unified"].map(|hierarchy| root.path().join(hierarchy))
        );
    }
}
