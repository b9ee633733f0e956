//! Processes: their identity, their membership of a cell, and their confirmed end.
//!
//! A process has no power over the facts that decide: its PID and start time, its parent, its
//! network namespace and its cgroup. The memory of other processes (with their environment and
//! command line) is never read, and at most [`PROC_FILE_LIMIT`] of each of their files in `/proc`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kiyot_linux::process_stat;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

use crate::{
    cgroup::{self, Hierarchy},
    shortage::found,
};

/// Bounds the read part of a process's file in `/proc`, in bytes. The longest file, `cgroup`, has a
/// path of at most 4 KiB for each of a dozen hierarchies.
const PROC_FILE_LIMIT: u64 = 64 * 1024;
/// Bounds the processes that are killed before the next scan, and with them the open pidfds. The
/// oldest are killed first: the kernel kills a PID namespace with its first process.
const KILL_BATCH: usize = 256;

/// A process, by its PID and its start time, which tells it from a later process with this PID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) pid: i32,
    /// The start time, in clock ticks since boot.
    pub(super) start: u64,
}

/// The fields of `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    state: u8,
    parent: i32,
    threads: u32,
    start: u64,
}

impl Stat {
    fn parse(text: &[u8]) -> Option<Self> {
        let mut fields = process_stat::fields(text)?;
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        // In the line, the state is field 3, the parent 4, the threads 20, the start time 22.
        let threads = fields.nth(15)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        Some(Self { state, parent, threads, start })
    }

    fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(read(pid, "stat")?.and_then(|line| Self::parse(&line)))
    }

    /// Returns whether the process holds resources. A zombie holds resources only if it has threads
    /// that have not exited.
    fn runs(self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x') || self.threads > 1
    }
}

/// Reads at most [`PROC_FILE_LIMIT`] of a process's file in `/proc`; `None` if the process has
/// exited. Errors are those of [`found`].
fn read(pid: i32, file: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = found(fs::File::open(format!("/proc/{pid}/{file}")))? else {
        return Ok(None);
    };
    let mut content = Vec::new();
    Ok(found(file.take(PROC_FILE_LIMIT).read_to_end(&mut content))?.map(|_| content))
}

impl Identity {
    /// Returns the process with this PID; an error if the daemon lacks the resources to read it.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(Stat::of(pid)?.map(|stat| Self { pid, start: stat.start }))
    }

    /// Returns whether the process runs. Errors are those of [`Self::of`].
    pub(super) fn runs(self) -> io::Result<bool> {
        Ok(Stat::of(self.pid)?.is_some_and(|stat| stat.start == self.start && stat.runs()))
    }
}

/// Returns the memory that a process shares with no other, in bytes; 0 if it has exited.
pub(super) fn resident_bytes(pid: i32) -> io::Result<u64> {
    let text = read(pid, "statm")?.unwrap_or_default();
    let mut pages = std::str::from_utf8(&text)
        .unwrap_or_default()
        .split_ascii_whitespace()
        .map(|field| field.parse::<u64>().unwrap_or_default());
    // Total, resident, and resident shared with files.
    let (_, resident, shared) = (pages.next(), pages.next(), pages.next());
    let own = resident.unwrap_or_default().saturating_sub(shared.unwrap_or_default());
    Ok(own.saturating_mul(rustix::param::page_size() as u64))
}

/// A snapshot of the running processes by PID, each with its parent.
#[derive(Debug, Default)]
struct Table(BTreeMap<i32, (Identity, i32)>);

impl Table {
    /// Reads all processes.
    fn read() -> io::Result<Self> {
        let mut table = Self::default();
        for pid in pids()? {
            let pid = pid?;
            if let Some(stat) = Stat::of(pid)?.filter(|stat| stat.runs()) {
                table.0.insert(pid, (Identity { pid, start: stat.start }, stat.parent));
            }
        }
        Ok(table)
    }

    /// Returns these processes with their descendants.
    fn with_descendants(&self, of: BTreeSet<Identity>) -> BTreeSet<Identity> {
        let mut children: BTreeMap<i32, Vec<Identity>> = BTreeMap::new();
        for (identity, parent) in self.0.values() {
            children.entry(*parent).or_default().push(*identity);
        }
        let mut open: Vec<_> = of.into_iter().collect();
        let mut all = BTreeSet::new();
        while let Some(identity) = open.pop() {
            if all.insert(identity) {
                // An older child belongs to an earlier process with the parent's PID.
                let own = children.get(&identity.pid).into_iter().flatten();
                open.extend(own.filter(|child| child.start >= identity.start));
            }
        }
        all
    }
}

/// Returns the processes of an instance that are found without a scan of all processes: its
/// launcher, and the processes in the cell's own cgroup. The calling process is never among them.
///
/// Every process of a cell's PID namespace descends from the namespace's first process, which is in
/// the cell's cgroup: the kernel kills them all when the first process dies.
pub(super) fn first_of_instance(
    hierarchies: &[Hierarchy],
    cell: &str,
    launcher: Option<Identity>,
) -> io::Result<BTreeSet<Identity>> {
    let mut grouped = BTreeSet::new();
    for pid in cgroup::processes(hierarchies, cell)? {
        grouped.extend(running(pid)?);
    }
    if !grouped.is_empty() {
        // A PID may have been reused between both reads; the second list lacks the new process.
        let listed = cgroup::processes(hierarchies, cell)?;
        grouped.retain(|identity| listed.contains(&identity.pid));
    }
    if let Some(launcher) = launcher
        && launcher.runs()?
    {
        grouped.insert(launcher);
    }
    grouped.retain(|identity| !is_own(identity.pid));
    Ok(grouped)
}

/// Returns all processes of an instance: those of [`first_of_instance`], those in its network
/// namespace (including the daemon's programs for the cell), and the descendants of both. The
/// calling process is never among them.
pub(super) fn of_instance(
    hierarchies: &[Hierarchy],
    cell: &str,
    netns: &Path,
    launcher: Option<Identity>,
) -> io::Result<BTreeSet<Identity>> {
    let mut members = first_of_instance(hierarchies, cell, launcher)?;
    let daemons = network_of(Path::new("/proc/self/ns/net"))?;
    // The daemon's own namespace is never a cell's, whatever is at the path.
    if let Some(network) = network_of(netns)?.filter(|network| Some(*network) != daemons) {
        for pid in pids()? {
            let pid = pid?;
            if network_of(Path::new(&format!("/proc/{pid}/ns/net")))? == Some(network) {
                members.extend(running(pid)?);
            }
        }
        members.retain(|identity| !is_own(identity.pid));
    }
    if members.is_empty() {
        return Ok(members);
    }
    Ok(Table::read()?.with_descendants(members))
}

/// Returns the cgroups of the containers of these processes: directories whose name is a
/// container's id, not those of the pod.
pub(super) fn container_cgroups(
    hierarchies: &[Hierarchy],
    processes: &BTreeSet<Identity>,
) -> io::Result<BTreeSet<PathBuf>> {
    let mut cgroups = BTreeSet::new();
    for process in processes {
        let Some(text) = read(process.pid, "cgroup")? else { continue };
        cgroups.extend(cgroup::container_dirs(hierarchies, &text));
    }
    Ok(cgroups)
}

/// Returns the PIDs of all processes.
fn pids() -> io::Result<impl Iterator<Item = io::Result<i32>>> {
    let pid = |entry: fs::DirEntry| entry.file_name().to_str().and_then(|name| name.parse().ok());
    Ok(fs::read_dir("/proc")?.filter_map(move |entry| entry.map(pid).transpose()))
}

/// Returns the process with a PID, if it runs.
fn running(pid: i32) -> io::Result<Option<Identity>> {
    let stat = Stat::of(pid)?.filter(|stat| stat.runs());
    Ok(stat.map(|stat| Identity { pid, start: stat.start }))
}

fn is_own(pid: i32) -> bool {
    u32::try_from(pid) == Ok(std::process::id())
}

/// Returns the device and inode of the network namespace at a path.
fn network_of(path: &Path) -> io::Result<Option<(u64, u64)>> {
    Ok(found(fs::metadata(path))?.map(|metadata| (metadata.dev(), metadata.ino())))
}

/// Kills a process by a pidfd, never a later process with its PID. Returns the pidfd, which becomes
/// readable when the process ends.
fn kill(identity: Identity) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(identity.pid) else { return Ok(None) };
    let handle = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => handle,
        // Without flags, EINVAL means that the PID was reaped during the call (pidfd_prepare, Linux
        // before 6.15).
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // The pidfd belongs to the current owner of the PID, which may be a later process.
    if !identity.runs()? {
        return Ok(None);
    }
    match pidfd_send_signal(&handle, Signal::KILL) {
        Ok(()) => Ok(Some(handle)),
        Err(Errno::SRCH) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Kills the [`KILL_BATCH`] oldest of these processes and waits for their end. Returns the
/// processes that still run after `limit`. Blocking.
pub(super) fn end(processes: &BTreeSet<Identity>, limit: Duration) -> io::Result<Vec<Identity>> {
    let deadline = Instant::now() + limit;
    let mut oldest: Vec<_> = processes.iter().collect();
    oldest.sort_by_key(|identity| (identity.start, identity.pid));
    let mut handles = Vec::new();
    for identity in oldest.into_iter().take(KILL_BATCH) {
        if let Some(handle) = kill(*identity)? {
            handles.push((*identity, handle));
        }
    }
    let mut left = Vec::new();
    for (identity, handle) in handles {
        if !ended_by(&handle, deadline)? && identity.runs()? {
            left.push(identity);
        }
    }
    Ok(left)
}

/// Waits until a process ends or the deadline passes. Returns whether it ended.
fn ended_by(handle: &OwnedFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let rest = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))
            .map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&rest)) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stat_line_is_parsed() {
        let line =
            b"4242 (a) b) (c) S 17 4242 4242 0 -1 4194560 110 0 0 0 0 0 0 0 20 0 1 0 123456 \
                     2760704 210 18446744073709551615\n";
        assert_eq!(
            Stat::parse(line),
            Some(Stat { state: b'S', parent: 17, threads: 1, start: 123_456 })
        );
        assert_eq!(Stat::parse(b"4242 (a) S 17"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    proptest! {
        #[test]
        fn stat_line_of_any_bytes_is_accepted(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Stat::parse(&line);
        }

        #[test]
        fn stat_line_with_any_name_is_parsed(
            name in "[ -~]{0,15}", parent in 0..i32::MAX, start in any::<u64>()
        ) {
            let rest = "1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0";
            let line = format!("1 ({name}) R {parent} {rest} {start} 0");
            prop_assert_eq!(
                Stat::parse(line.as_bytes()),
                Some(Stat { state: b'R', parent, threads: 1, start })
            );
        }
    }

    #[test]
    fn process_with_another_start_time_does_not_run() {
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        assert!(own.runs().unwrap());
        assert!(!Identity { start: own.start + 1, ..own }.runs().unwrap());
    }

    /// Starts a program and waits until it has written a line.
    fn started(command: &[&str]) -> (Child, Identity) {
        let mut child =
            Command::new(command[0]).args(&command[1..]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut output = io::BufReader::new(child.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let identity = Identity::of(i32::try_from(child.id()).unwrap()).unwrap().unwrap();
        (child, identity)
    }

    #[test]
    fn launcher_is_killed_with_its_children() {
        let (mut child, shell) = started(&["sh", "-c", "sleep 1000 & echo started; wait"]);
        let look =
            |launcher| of_instance(&[], "no-cell", Path::new("/no/netns"), launcher).unwrap();
        let found = look(Some(shell));
        assert!(found.contains(&shell) && found.len() == 2, "{found:?}");
        assert_eq!(look(None), BTreeSet::new());
        assert_eq!(end(&found, Duration::from_secs(60)).unwrap(), []);
        child.wait().unwrap();
        assert_eq!(look(Some(shell)), BTreeSet::new());
        assert!(
            end(&found, Duration::from_secs(60)).unwrap().is_empty(),
            "a repeated kill succeeds"
        );
    }

    #[test]
    fn process_in_the_network_of_an_instance_is_found_without_its_launcher() {
        let (mut child, shell) =
            started(&["unshare", "-n", "sh", "-c", "echo started; exec sleep 1000"]);
        let netns = format!("/proc/{}/ns/net", child.id());
        assert_eq!(first_of_instance(&[], "no-cell", None).unwrap(), BTreeSet::new());
        let found = of_instance(&[], "no-cell", Path::new(&netns), None).unwrap();
        assert!(found.contains(&shell), "{found:?}");
        let own = of_instance(&[], "no-cell", Path::new("/proc/self/ns/net"), None).unwrap();
        assert_eq!(own, BTreeSet::new(), "the daemon's own network belongs to no cell");
        let left = end(&found, Duration::from_secs(60)).unwrap();
        child.wait().unwrap();
        assert_eq!(left, []);
    }

    /// Verifies N15.
    #[test]
    fn child_older_than_its_parent_is_no_descendant() {
        let identity = |pid, start| Identity { pid, start };
        let table = Table(
            [(7, 50, 1), (8, 60, 7), (9, 40, 7), (10, 60, 8)]
                .map(|(pid, start, parent)| (pid, (identity(pid, start), parent)))
                .into(),
        );
        assert_eq!(
            table.with_descendants([identity(7, 50)].into()),
            [identity(7, 50), identity(8, 60), identity(10, 60)].into()
        );
    }

    #[test]
    fn process_with_an_exited_first_thread_runs() {
        let stat = |state, threads| Stat { state, parent: 1, threads, start: 1 };
        assert!(stat(b'Z', 2).runs() && stat(b'S', 1).runs());
        assert!(!stat(b'Z', 1).runs() && !stat(b'X', 0).runs());
    }
}
