//! Cgroups of cells and of their containers, in version 1, version 2 and hybrid hierarchies.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io,
    io::{BufRead, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use kiyot_engine::provider::CGROUP_BENEATH_SLICE;
use kiyot_linux::{mountinfo, tree::RelPath};
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat},
    io::Errno,
};

use crate::shortage::found;

/// The parent of all cells' cgroups, in each hierarchy.
pub(super) const PARENT: &str = "kiyot";
/// Bounds the time for which a cgroup may stay busy after the end of its last process.
const BUSY_LIMIT: Duration = Duration::from_secs(10);
/// The pause before another attempt.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Bounds the search for a pod's cgroups in a hierarchy: the directories and the depth.
const SEARCH_LIMIT: (usize, usize) = (20_000, 6);
/// Bounds the cgroups below a cell's own that are searched for processes.
const BENEATH_LIMIT: usize = 20_000;
/// Bounds the depth of a pod's cgroup. A kubelet's has three levels below the configured root.
const MAX_DEPTH: usize = 16;

/// A mounted cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(super) mount: PathBuf,
    /// The directory of the hierarchy that is the mount's root.
    root: PathBuf,
    /// The controllers; empty for version 2, `["name=systemd"]` for a hierarchy without
    /// controllers.
    controllers: Vec<String>,
}

impl Hierarchy {
    /// Returns a hierarchy of plain directories. For names and removal they behave like empty
    /// cgroups.
    #[cfg(test)]
    pub(super) fn played(dir: &Path, controllers: &[&str]) -> Self {
        let controllers = controllers.iter().map(|&name| name.to_owned()).collect();
        Self { mount: dir.to_owned(), root: "/".into(), controllers }
    }

    pub(super) fn is_v2(&self) -> bool {
        self.controllers.is_empty()
    }

    /// Returns whether a hierarchy of version 1 has a controller.
    pub(super) fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|own| own == controller)
    }

    /// Returns the directory of a cell's own cgroup.
    pub(super) fn of_cell(&self, cell: &str) -> PathBuf {
        self.mount.join(name(cell))
    }

    /// Returns the directory of a path that `/proc/<pid>/cgroup` shows.
    fn dir(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.root).ok()?;
        kiyot_linux::tree::beneath(&self.mount, below).ok()
    }
}

/// Returns the mounted hierarchies.
pub(crate) fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    Ok(parse_hierarchies(&fs::read("/proc/self/mountinfo")?))
}

pub(super) fn parse_hierarchies(table: &[u8]) -> Vec<Hierarchy> {
    const FLAGS: [&str; 9] = [
        "rw",
        "ro",
        "xattr",
        "clone_children",
        "noprefix",
        "nsdelegate",
        "memory_recursiveprot",
        "memory_localevents",
        "favordynmods",
    ];
    let mut found: Vec<Hierarchy> = Vec::new();
    for mount in mountinfo::parse(table) {
        let controllers: Vec<String> = match mount.kind.as_str() {
            "cgroup2" => Vec::new(),
            "cgroup" => mount
                .options
                .split(',')
                .filter(|option| !FLAGS.contains(option) && !option.starts_with("release_agent="))
                .map(Into::into)
                .collect(),
            _ => continue,
        };
        if (mount.kind == "cgroup" && controllers.is_empty())
            || found.iter().any(|known| known.controllers == controllers)
        {
            continue;
        }
        found.push(Hierarchy { mount: mount.point, root: mount.root, controllers });
    }
    found
}

/// Returns the path of a cell's own cgroup below each mount point.
pub(super) fn name(cell: &str) -> String {
    format!("{PARENT}/{cell}")
}

/// Returns the path of a `cgroup_parent` relative to a mount point; `None` if it leads outside.
pub(super) fn relative(parent: &str) -> Option<RelPath> {
    let path = RelPath::parse(parent.trim_matches('/')).ok()?;
    (path.as_str().split('/').count() <= MAX_DEPTH).then_some(path)
}

/// Creates a cell's own cgroup in each hierarchy.
pub(super) fn make(hierarchies: &[Hierarchy], cell: &str) -> io::Result<()> {
    for hierarchy in hierarchies {
        let parent = hierarchy.mount.join(PARENT);
        let dir = hierarchy.of_cell(cell);
        // The end of another cell may remove the parent in between.
        let mut made = fs::create_dir_all(&dir);
        for _ in 0..5 {
            if !matches!(&made, Err(error) if error.kind() == io::ErrorKind::NotFound) {
                break;
            }
            made = fs::create_dir_all(&dir);
        }
        made.map_err(|error| named(&dir, error))?;
        if hierarchy.has("cpuset") {
            inherit_cpuset(&hierarchy.mount, &parent)?;
            inherit_cpuset(&parent, &dir)?;
        }
    }
    Ok(())
}

/// Moves a process into a cell's own cgroup, which is created if absent, in the hierarchy that
/// decides membership. Succeeds if the process has exited.
pub(super) fn enter(cell: &str, pid: u32) -> io::Result<()> {
    let hierarchies = hierarchies()?;
    // Prefers the hierarchy in which systemd tracks services. A single hierarchy must do, because a
    // move takes milliseconds.
    let is_named = |hierarchy: &&Hierarchy| hierarchy.controllers == ["name=systemd"];
    let hierarchy = hierarchies
        .iter()
        .find(|hierarchy| hierarchy.is_v2())
        .or_else(|| hierarchies.iter().find(is_named))
        .or_else(|| hierarchies.first())
        .ok_or_else(|| io::Error::other("no cgroup hierarchy is mounted"))?;
    make(std::slice::from_ref(hierarchy), cell)?;
    let procs = hierarchy.of_cell(cell).join("cgroup.procs");
    match fs::write(&procs, pid.to_string()) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => Ok(()),
        written => written.map_err(|error| named(&procs, error)),
    }
}

/// Returns the PIDs in a cell's own cgroup and below it, in any hierarchy.
pub(super) fn processes(hierarchies: &[Hierarchy], cell: &str) -> io::Result<BTreeSet<i32>> {
    let mut pids = BTreeSet::new();
    let mut open: Vec<_> = hierarchies.iter().map(|hierarchy| hierarchy.of_cell(cell)).collect();
    let mut looked = 0;
    while let Some(dir) = open.pop() {
        looked += 1;
        if looked > BENEATH_LIMIT {
            return Err(io::Error::other(format!(
                "{cell} has more than {BENEATH_LIMIT} cgroups of its own"
            )));
        }
        let Some(procs) = found(fs::File::open(dir.join("cgroup.procs")))? else { continue };
        for line in io::BufReader::new(procs).split(b'\n') {
            // A cgroup that was removed meanwhile has no processes.
            let Some(line) = found(line)? else { break };
            let pid =
                std::str::from_utf8(&line).ok().and_then(|line| line.trim().parse::<i32>().ok());
            // A process outside this PID namespace reads as 0.
            pids.extend(pid.filter(|pid| *pid > 0));
        }
        open.extend(children(&dir));
    }
    Ok(pids)
}

/// Kills all processes in a cell's own cgroup and below it, if the kernel can (version 2, Linux
/// 5.14).
pub(super) fn kill(hierarchies: &[Hierarchy], cell: &str) {
    for hierarchy in hierarchies.iter().filter(|hierarchy| hierarchy.is_v2()) {
        let file = hierarchy.of_cell(cell).join("cgroup.kill");
        // Without `cgroup.kill`, the caller kills each process by its PID.
        if file.exists() {
            let _ = fs::write(file, "1");
        }
    }
}

/// Copies CPUs and memory nodes from the parent: a version 1 cpuset without them accepts no
/// process.
pub(super) fn inherit_cpuset(from: &Path, to: &Path) -> io::Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let own = kiyot_linux::tree::own(to, file);
        if fs::read_to_string(&own).map_err(|error| named(&own, error))?.trim().is_empty() {
            let from = kiyot_linux::tree::own(from, file);
            let inherited = fs::read(&from).map_err(|error| named(&from, error))?;
            fs::write(&own, inherited).map_err(|error| named(&own, error))?;
        }
    }
    Ok(())
}

/// Returns the container directories in the lines of a `/proc/<pid>/cgroup`. Their names may hold
/// any byte but a newline.
pub(super) fn container_dirs(hierarchies: &[Hierarchy], text: &[u8]) -> Vec<PathBuf> {
    let dir = |line: &[u8]| {
        let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let hierarchy = hierarchies
            .iter()
            .find(|hierarchy| hierarchy.controllers.join(",").as_bytes() == controllers)?;
        let path = Path::new(OsStr::from_bytes(path));
        let container = path.ancestors().filter(|path| is_container(path)).last()?;
        hierarchy.dir(container)
    };
    text.split(|byte| *byte == b'\n').filter_map(dir).collect()
}

/// Returns whether a directory's name is a container's id, in the form of either of containerd's
/// cgroup drivers.
fn is_container(path: &Path) -> bool {
    container_of(path).is_some()
}

/// Returns the container id of a directory's name.
fn container_of(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let name = name
        .strip_prefix("cri-containerd-")
        .and_then(|name| name.strip_suffix(".scope"))
        .unwrap_or(name);
    (name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(name)
}

/// The ids by which the cgroups of an instance's containers are found.
#[derive(Debug, Clone, Default)]
pub(super) struct Containers {
    /// `metadata.uid` of the pod, if known.
    pub(super) pod_uid: Option<String>,
    /// The ids of the containers and sandboxes.
    pub(super) ids: BTreeSet<String>,
}

impl Containers {
    /// Returns the containers' cgroups in a pod's `cgroup_parent`, and their parent
    /// [`CGROUP_BENEATH_SLICE`] if that exists. Returns `None` if `cgroup_parent` names no
    /// directory below a mount point: the cgroups may then be anywhere.
    pub(super) fn within(
        &self,
        hierarchies: &[Hierarchy],
        cgroup_parent: &str,
    ) -> Option<BTreeSet<PathBuf>> {
        let path = relative(cgroup_parent)?;
        let mut found = BTreeSet::new();
        for hierarchy in hierarchies {
            self.collect(&path.beneath(&hierarchy.mount), &mut found);
        }
        Some(found)
    }

    /// Returns the containers' cgroups at any place, as [`Self::within`] does.
    pub(super) fn anywhere(&self, hierarchies: &[Hierarchy]) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        if self.pod_uid.is_none() && self.ids.is_empty() {
            return found;
        }
        for hierarchy in hierarchies {
            let (mut budget, depth) = SEARCH_LIMIT;
            let mut open = vec![(hierarchy.mount.clone(), 0)];
            while let Some((dir, level)) = open.pop() {
                for child in children(&dir) {
                    if self.has(&child) {
                        found.insert(child);
                    } else if self.is_pod(&child) {
                        self.collect(&child, &mut found);
                    } else if level < depth && budget > 0 {
                        budget -= 1;
                        open.push((child, level + 1));
                    }
                }
            }
        }
        found
    }

    /// Adds the cgroups in a parent's directory. All cgroups in the pod's own directory are the
    /// instance's, because a pod in a cell has no other containers.
    fn collect(&self, parent: &Path, found: &mut BTreeSet<PathBuf>) {
        let of_pod = self.is_pod(parent);
        let is_own = |dir: &PathBuf| if of_pod { is_container(dir) } else { self.has(dir) };
        let beneath = parent.join(CGROUP_BENEATH_SLICE);
        found.extend(children(&beneath).chain(children(parent)).filter(is_own));
        found.extend((of_pod && beneath.is_dir()).then_some(beneath));
    }

    fn has(&self, dir: &Path) -> bool {
        container_of(dir).is_some_and(|id| self.ids.contains(id))
    }

    /// Returns whether a directory has the name of the pod's cgroup, with either cgroup driver.
    fn is_pod(&self, dir: &Path) -> bool {
        let Some(uid) = &self.pod_uid else { return false };
        let Some(name) = dir.file_name().and_then(OsStr::to_str) else { return false };
        let slice = || format!("pod{}.slice", uid.replace('-', "_"));
        name.strip_prefix("pod") == Some(uid) || name.ends_with(&slice())
    }
}

/// Returns the child cgroups of a cgroup.
pub(super) fn children(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

/// Thaws frozen cgroups of version 1, so that their processes can exit. In version 2 a killed
/// process exits from a frozen cgroup.
pub(super) fn thaw(hierarchies: &[Hierarchy], cell: &str, containers: &BTreeSet<PathBuf>) {
    for hierarchy in hierarchies.iter().filter(|hierarchy| hierarchy.has("freezer")) {
        let own = hierarchy.of_cell(cell);
        let mut open: Vec<_> = containers
            .iter()
            .filter(|dir| dir.starts_with(&hierarchy.mount))
            .cloned()
            .chain([own])
            .collect();
        while let Some(dir) = open.pop() {
            // An absent or unfrozen cgroup needs no thaw.
            let _ = fs::write(dir.join("freezer.state"), "THAWED");
            open.extend(children(&dir));
        }
    }
}

/// Thaws the cell's own cgroup of version 2, so that programs can run in it. Succeeds if the cell
/// has no such cgroup.
pub(super) fn thaw_own(hierarchies: &[Hierarchy], cell: &str) -> io::Result<()> {
    for hierarchy in hierarchies.iter().filter(|hierarchy| hierarchy.is_v2()) {
        let file = hierarchy.of_cell(cell).join("cgroup.freeze");
        // Not `fs::write`, which would create the file outside of a cgroup file system.
        if let Some(mut file) = found(fs::OpenOptions::new().write(true).open(&file))? {
            file.write_all(b"0").map_err(|error| named(&hierarchy.mount, error))?;
        }
    }
    Ok(())
}

/// Removes a cell's own cgroup in each hierarchy, and the parent of all cells with the last cell.
pub(super) fn remove(hierarchies: &[Hierarchy], cell: &str) -> io::Result<()> {
    for hierarchy in hierarchies {
        remove_tree(&hierarchy.of_cell(cell), BUSY_LIMIT)?;
        // Fails while the parent has other cells.
        let _ = fs::remove_dir(hierarchy.mount.join(PARENT));
    }
    Ok(())
}

/// Removes the cgroups of a cell's containers, unless they have new processes. Then removes their
/// parent beneath the pod's slice, unless it has other containers.
pub(super) fn remove_containers(containers: &BTreeSet<PathBuf>) -> io::Result<()> {
    // Deepest first.
    for dir in containers.iter().rev() {
        if dir.ends_with(CGROUP_BENEATH_SLICE) {
            let _ = fs::remove_dir(dir);
            continue;
        }
        let inhabited = |dir: &Path| {
            fs::read(dir.join("cgroup.procs")).is_ok_and(|processes| !processes.is_empty())
        };
        if !inhabited(dir) {
            remove_tree(dir, BUSY_LIMIT)?;
        }
    }
    Ok(())
}

/// Removes a cgroup and its descendants, deepest first. A cgroup stays busy for a moment after its
/// last process has exited. The pod chooses the depth, so that a path may exceed the kernel's
/// limit.
fn remove_tree(dir: &Path, limit: Duration) -> io::Result<()> {
    let mut deadline = Instant::now() + limit;
    loop {
        let busy = match fs::remove_dir(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error)
                if matches!(Errno::from_io_error(&error), Some(Errno::BUSY | Errno::NOTEMPTY)) =>
            {
                error
            }
            Err(error) => return Err(named(dir, error)),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let removed = match openat(CWD, dir, flags, Mode::empty()) {
            Ok(top) => remove_beneath(top).map_err(|error| named(dir, error.into()))?,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(named(dir, error.into())),
        };
        if removed {
            deadline = Instant::now() + limit;
        } else if Instant::now() < deadline {
            sleep(BUSY_PAUSE);
        } else {
            return Err(named(dir, busy));
        }
    }
}

/// Removes the cgroups below a cgroup until it meets a busy cgroup. Returns whether it removed any.
fn remove_beneath(top: OwnedFd) -> Result<bool, Errno> {
    let (mut current, mut depth, mut removed) = (top, 0_usize, false);
    loop {
        let Some(name) = kiyot_linux::tree::first_subdirectory(&current)? else {
            let Some(above) = depth.checked_sub(1) else { return Ok(removed) };
            depth = above;
            current = kiyot_linux::tree::open_parent(&current)?;
            continue;
        };
        match unlinkat(&current, &*name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => removed = true,
            Err(Errno::BUSY | Errno::NOTEMPTY) => {
                let inner = match kiyot_linux::tree::open_dir(&current, &name) {
                    Err(Errno::NOENT) => continue,
                    inner => inner?,
                };
                if kiyot_linux::tree::first_subdirectory(&inner)?.is_none() {
                    return Ok(removed);
                }
                current = inner;
                depth += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
