//! Processes: who they are, which belong to a cell, and their certain end.
//!
//! A process can't choose what decides here: its number and start time, its parent, its network
//! namespace and its control group. Nothing is read of another process's memory (its environment
//! and command line are in it), and of its files in `/proc` no more than [`PROC_FILE_LIMIT`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    io::Read,
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

use super::{
    cgroup::{self, Hierarchy},
    shortage::found,
};

/// Bounds what is read of one file of a process in `/proc`, in bytes: the longest, `cgroup`, has a
/// path of 4 KiB at most for each of a dozen hierarchies.
const PROC_FILE_LIMIT: u64 = 64 * 1024;
/// Bounds the processes that are killed before it is looked again, and so the open files for that.
/// The oldest come first: with the first process of a PID namespace the kernel kills all others.
const KILL_BATCH: usize = 256;

/// A process, told from one that gets the same number later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) pid: i32,
    /// When it began, in clock ticks since boot.
    pub(super) start: u64,
}

/// What `/proc/<pid>/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    state: u8,
    parent: i32,
    threads: u32,
    start: u64,
}

impl Stat {
    /// The command's name is in parentheses, and may hold any byte, parentheses too.
    fn parse(text: &[u8]) -> Option<Self> {
        let rest = text.get(text.iter().rposition(|byte| *byte == b')')? + 1..)?;
        let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        // State is field 3 of the line, parent 4, threads 20, start 22.
        let threads = fields.nth(15)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        Some(Self { state, parent, threads, start })
    }

    fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(read(pid, "stat")?.and_then(|line| Self::parse(&line)))
    }

    /// Returns whether it holds anything: a zombie does not, unless only its first thread ended.
    fn runs(self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x') || self.threads > 1
    }
}

/// Reads the begin of a file of a process in `/proc`, [`PROC_FILE_LIMIT`] of it at most. `None` if
/// the process has ended; an error as of [`found`].
pub(super) fn read(pid: i32, file: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = found(fs::File::open(format!("/proc/{pid}/{file}")))? else {
        return Ok(None);
    };
    let mut content = Vec::new();
    Ok(found(file.take(PROC_FILE_LIMIT).read_to_end(&mut content))?.map(|_| content))
}

impl Identity {
    /// The process that has this number now; an error if it can't be looked at for want of
    /// something of ours.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(Stat::of(pid)?.map(|stat| Self { pid, start: stat.start }))
    }

    /// Whether it has not ended; an error as of [`Self::of`].
    pub(super) fn runs(self) -> io::Result<bool> {
        Ok(Stat::of(self.pid)?.is_some_and(|stat| stat.start == self.start && stat.runs()))
    }
}

/// The processes that run now, by their numbers.
#[derive(Debug, Default)]
struct Table(BTreeMap<i32, (Identity, i32)>);

impl Table {
    /// Looks at all of them. What `is_member` says of a process is kept for those it says yes to.
    fn read(mut is_member: impl FnMut(Identity) -> bool) -> io::Result<(Self, BTreeSet<Identity>)> {
        let (mut table, mut members) = (Self::default(), BTreeSet::new());
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if let Some(identity) = table.add(pid)?
                && is_member(identity)
            {
                members.insert(identity);
            }
        }
        Ok((table, members))
    }

    /// Looks at one more, unless it is known.
    fn add(&mut self, pid: i32) -> io::Result<Option<Identity>> {
        if let Some((identity, _)) = self.0.get(&pid) {
            return Ok(Some(*identity));
        }
        let Some(stat) = Stat::of(pid)?.filter(|stat| stat.runs()) else { return Ok(None) };
        let identity = Identity { pid, start: stat.start };
        self.0.insert(pid, (identity, stat.parent));
        Ok(Some(identity))
    }

    /// The descendants of some processes, with them.
    fn with_descendants(&self, of: BTreeSet<Identity>) -> BTreeSet<Identity> {
        let mut children: BTreeMap<i32, Vec<Identity>> = BTreeMap::new();
        for (identity, parent) in self.0.values() {
            children.entry(*parent).or_default().push(*identity);
        }
        let mut open: Vec<_> = of.into_iter().collect();
        let mut all = BTreeSet::new();
        while let Some(identity) = open.pop() {
            if all.insert(identity) {
                // A child that is older is of a process that had the number before.
                let own = children.get(&identity.pid).into_iter().flatten();
                open.extend(own.filter(|child| child.start >= identity.start));
            }
        }
        all
    }
}

/// All that runs for an instance: its launcher, who is in its network namespace or in the cell's
/// own control group (there is what the daemon runs for it too), and the descendants of all of
/// them. The calling process is never among them.
///
/// Each of the processes of a cell's PID namespace is a descendant of its first one, and that is in
/// the cell's control group.
pub(super) fn of_instance(
    hierarchies: &[Hierarchy],
    cell: &str,
    netns: &Path,
    launcher: Option<Identity>,
) -> io::Result<BTreeSet<Identity>> {
    let network = network_of(netns);
    let inside = |pid: i32| {
        network.is_some() && network_of(Path::new(&format!("/proc/{pid}/ns/net"))) == network
    };
    let (mut table, mut members) =
        Table::read(|identity| launcher == Some(identity) || inside(identity.pid))?;
    let mut grouped = BTreeSet::new();
    for pid in cgroup::processes(hierarchies, cell)? {
        grouped.extend(table.add(pid)?);
    }
    // A number may have become another process's between both looks; that one is not listed again.
    let listed = cgroup::processes(hierarchies, cell)?;
    members.extend(grouped.into_iter().filter(|identity| listed.contains(&identity.pid)));
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    members.retain(|identity| identity.pid != own);
    Ok(table.with_descendants(members))
}

/// A network namespace, told from others, but never the daemon's own.
fn network_of(path: &Path) -> Option<(u64, u64)> {
    let identity =
        |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    identity(path)
        .filter(|network| identity(Path::new("/proc/self/ns/net")).as_ref() != Some(network))
}

/// Kills a process for good: nothing is done to another one that has its number by now. Returns
/// what tells of its end.
fn kill(identity: Identity) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(identity.pid) else { return Ok(None) };
    let handle = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => handle,
        // Without flags, INVAL is a number that is no process's any more: it was reaped between two
        // looks of the kernel's (pidfd_prepare, Linux before 6.15).
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // The handle is of whoever has the number now: only one that is still the same is killed.
    if !identity.runs()? {
        return Ok(None);
    }
    match pidfd_send_signal(&handle, Signal::KILL) {
        Ok(()) => Ok(Some(handle)),
        Err(Errno::SRCH) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Kills the [`KILL_BATCH`] oldest of some processes and waits for their end. Those of them that
/// have not ended after `limit` are returned. Blocking.
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

/// Waits for a process' end; `false` at the deadline.
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
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_of_proc() {
        let line = b"4242 (a) b) (c) S 17 4242 4242 0 -1 4194560 110 0 0 0 0 0 0 0 20 0 1 0 123456 2760704 210 18446744073709551615\n";
        assert_eq!(
            Stat::parse(line),
            Some(Stat { state: b'S', parent: 17, threads: 1, start: 123_456 })
        );
        assert_eq!(Stat::parse(b"4242 (a) S 17"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    proptest! {
        #[test]
        fn no_line_is_too_strange(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Stat::parse(&line);
        }

        #[test]
        fn any_name_will_do(name in "[ -~]{0,15}", parent in 0..i32::MAX, start in any::<u64>()) {
            let line = format!("1 ({name}) R {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0");
            prop_assert_eq!(
                Stat::parse(line.as_bytes()),
                Some(Stat { state: b'R', parent, threads: 1, start })
            );
        }
    }

    #[test]
    fn this_process_runs_and_another_of_its_number_does_not() {
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        assert!(own.runs().unwrap());
        assert!(!Identity { start: own.start + 1, ..own }.runs().unwrap());
    }

    #[test]
    fn launcher_and_its_children_end() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "sleep 1000 & echo started; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line)
            .unwrap();
        let shell = Identity::of(i32::try_from(child.id()).unwrap()).unwrap().unwrap();
        let look =
            |launcher| of_instance(&[], "no-cell", Path::new("/no/netns"), launcher).unwrap();
        let found = look(Some(shell));
        assert!(found.contains(&shell) && found.len() == 2, "{found:?}");
        assert_eq!(look(None), BTreeSet::new());
        assert_eq!(end(&found, Duration::from_secs(60)).unwrap(), []);
        child.wait().unwrap();
        assert_eq!(look(Some(shell)), BTreeSet::new());
        assert!(end(&found, Duration::from_secs(60)).unwrap().is_empty(), "again is fine");
    }

    /// Verifies N15.
    #[test]
    fn child_older_than_its_parents_number_is_no_descendant() {
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
    fn process_whose_first_thread_ended_runs() {
        let stat = |state, threads| Stat { state, parent: 1, threads, start: 1 };
        assert!(stat(b'Z', 2).runs() && stat(b'S', 1).runs());
        assert!(!stat(b'Z', 1).runs() && !stat(b'X', 0).runs());
    }
}
