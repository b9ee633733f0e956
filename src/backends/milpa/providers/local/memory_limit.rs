//! Limit of the memory of a cell's own processes.

use std::{fs, io, path::Path};

use super::{
    cgroup::{Hierarchy, PARENT, name},
    shortage::found,
};

/// The controller in both versions.
const CONTROLLER: &str = "memory";

/// Limits the memory of the processes in a cell's own cgroup. Where the node has no such
/// controller, there is no limit.
pub(super) fn set(hierarchies: &[Hierarchy], cell: &str, bytes: u64) -> io::Result<()> {
    for hierarchy in hierarchies {
        let dir = hierarchy.mount.join(name(cell));
        if hierarchy.has(CONTROLLER) {
            write(&dir.join("memory.limit_in_bytes"), &bytes.to_string())?;
        } else if hierarchy.is_v2() && delegates(&hierarchy.mount.join(PARENT))? {
            write(&dir.join("memory.max"), &bytes.to_string())?;
        }
    }
    Ok(())
}

/// Has the cgroups below a directory of version 2 get the controller. Returns false if the
/// directory has none to give: systemd decides that at the root.
fn delegates(parent: &Path) -> io::Result<bool> {
    let controllers = found(fs::read_to_string(parent.join("cgroup.controllers")))?;
    if !controllers.unwrap_or_default().split_whitespace().any(|name| name == CONTROLLER) {
        return Ok(false);
    }
    write(&parent.join("cgroup.subtree_control"), &format!("+{CONTROLLER}"))?;
    Ok(true)
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::{super::cgroup::parse_hierarchies, *};

    const CELL: &str = "cell-aaaaaaaaaaaa";

    /// Returns a directory that has the form of a hierarchy, and its hierarchy.
    fn hierarchy(kind: &str, options: &str) -> (tempfile::TempDir, Vec<Hierarchy>) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(name(CELL))).unwrap();
        let at = dir.path().display();
        let line = format!("30 1 0:1 / {at} rw - {kind} {kind} {options}\n");
        let hierarchies = parse_hierarchies(line.as_bytes());
        assert_eq!(hierarchies.len(), 1);
        (dir, hierarchies)
    }

    /// Verifies V11.
    #[test]
    fn memory_is_limited_in_both_versions_of_cgroups() {
        let (dir, hierarchies) = hierarchy("cgroup", "rw,memory");
        set(&hierarchies, CELL, 4096).unwrap();
        let read = |dir: &tempfile::TempDir, file: &str| {
            fs::read_to_string(dir.path().join(PARENT).join(file)).unwrap()
        };
        assert_eq!(read(&dir, &format!("{CELL}/memory.limit_in_bytes")), "4096");

        let (dir, hierarchies) = hierarchy("cgroup2", "rw,nsdelegate");
        fs::write(dir.path().join(PARENT).join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        set(&hierarchies, CELL, 4096).unwrap();
        assert_eq!(read(&dir, "cgroup.subtree_control"), "+memory");
        assert_eq!(read(&dir, &format!("{CELL}/memory.max")), "4096");
    }

    #[test]
    fn node_without_the_controller_has_no_limit() {
        for (kind, options) in [("cgroup", "rw,cpu,cpuacct"), ("cgroup2", "rw")] {
            let (dir, hierarchies) = hierarchy(kind, options);
            set(&hierarchies, CELL, 4096).unwrap();
            let files = fs::read_dir(dir.path().join(name(CELL))).unwrap().count();
            assert_eq!(files, 0, "{kind}");
        }
    }
}
