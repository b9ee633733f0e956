//! The control group of a cell's own processes (its pod's containers are where the kubelet wants
//! them).

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

/// Where control groups are mounted.
pub const ROOT: &str = "/sys/fs/cgroup";

/// Why a control group could not be joined.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The name leads elsewhere.
    #[error("the control group {0:?}: allowed is a relative path of plain names")]
    Name(String),
    /// The file system refused.
    #[error("the control group {0:?}")]
    Io(PathBuf, #[source] io::Error),
}

/// Makes the group `name` where it is missing, and moves this process into it: in version 2's one
/// tree, or in each tree of version 1 and the one of version 2 beside them.
pub fn join(root: &Path, name: &str) -> Result<(), CgroupError> {
    let relative = Path::new(name);
    if name.is_empty()
        || !relative.components().all(|component| matches!(component, Component::Normal(_)))
    {
        return Err(CgroupError::Name(name.to_owned()));
    }
    for tree in trees(root).map_err(|source| CgroupError::Io(root.to_owned(), source))? {
        let group = tree.join(relative);
        join_group(&tree, relative).map_err(|source| CgroupError::Io(group, source))?;
    }
    Ok(())
}

/// The roots of the trees: that of version 2, else all (a link names the same tree again). A tree
/// of version 2 beside those of version 1 has no controllers to speak of, but systemd tells by it
/// what belongs to a service.
fn trees(root: &Path) -> io::Result<Vec<PathBuf>> {
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.to_owned()]);
    }
    let mut trees = Vec::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.path().join("cgroup.procs").exists() {
            trees.push(entry.path());
        }
    }
    Ok(trees)
}

fn join_group(tree: &Path, relative: &Path) -> io::Result<()> {
    let mut group = tree.to_owned();
    for component in relative.components() {
        let parent = group.clone();
        group.push(component);
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // A new cpuset of version 1 is empty, and nothing can join it so.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            inherit(&parent.join(file), &group.join(file))?;
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
    fn a_name_stays_beneath_the_root() {
        let root = tempfile::tempdir().unwrap();
        for name in ["", "/kiyot", "../kiyot", "kiyot/../..", "."] {
            assert!(matches!(join(root.path(), name), Err(CgroupError::Name(_))), "{name}");
        }
    }

    #[test]
    fn each_tree_is_joined_once() {
        let root = tempfile::tempdir().unwrap();
        for tree in ["cpu", "memory", "unified"] {
            fs::create_dir(root.path().join(tree)).unwrap();
            fs::write(root.path().join(tree).join("cgroup.procs"), "").unwrap();
        }
        fs::write(root.path().join("unified/cgroup.controllers"), "").unwrap();
        fs::create_dir(root.path().join("empty")).unwrap();
        std::os::unix::fs::symlink("cpu", root.path().join("cpuacct")).unwrap();
        let mut found = trees(root.path()).unwrap();
        found.sort();
        assert_eq!(found, ["cpu", "memory", "unified"].map(|tree| root.path().join(tree)));
    }
}
