//! Processes: who they are, which belong to a cell, and their certain end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
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

use super::{command::INSTANCE_VARIABLE, shortage::found};

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
    start: u64,
}

impl Stat {
    /// The command's name is in parentheses, and may hold any byte, parentheses too.
    fn parse(text: &[u8]) -> Option<Self> {
        let rest = text.get(text.iter().rposition(|byte| *byte == b')')? + 1..)?;
        let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        // Field 22 of the line; state is field 3, parent field 4.
        let start = fields.nth(17)?.parse().ok()?;
        Some(Self { state, parent, start })
    }

    fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(found(fs::read(format!("/proc/{pid}/stat")))?.and_then(|line| Self::parse(&line)))
    }

    /// One that waits for its parent to look holds nothing any more.
    fn runs(self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x')
    }
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

/// All that runs for the instance of a directory: its launcher, what the daemon runs for it (marked
/// in their environment), who is in its network namespace, and the descendants of all of them. The
/// calling process is never among them.
pub(super) fn of_instance(
    dir: &Path,
    netns: &Path,
    launcher: Option<Identity>,
) -> io::Result<BTreeSet<Identity>> {
    let mark = [INSTANCE_VARIABLE.as_bytes(), b"=", dir.as_os_str().as_bytes()].concat();
    let network = network_of(netns);
    let mut children: BTreeMap<i32, Vec<Identity>> = BTreeMap::new();
    let mut members: Vec<Identity> = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Some(stat) = Stat::of(pid)?.filter(|stat| stat.runs()) else { continue };
        let identity = Identity { pid, start: stat.start };
        children.entry(stat.parent).or_default().push(identity);
        let marked = || {
            let environment = found(fs::read(format!("/proc/{pid}/environ")))?;
            Ok::<_, io::Error>(environment.is_some_and(|environment| {
                environment.split(|byte| *byte == 0).any(|variable| variable == mark)
            }))
        };
        let inside = || {
            network.is_some() && network_of(Path::new(&format!("/proc/{pid}/ns/net"))) == network
        };
        if launcher == Some(identity) || inside() || marked()? {
            members.push(identity);
        }
    }
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let mut all = BTreeSet::new();
    while let Some(identity) = members.pop() {
        if identity.pid != own && all.insert(identity) {
            members.extend(children.get(&identity.pid).into_iter().flatten());
        }
    }
    Ok(all)
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
        Err(Errno::SRCH) => return Ok(None),
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

/// Kills processes and waits for their end. Those that have not ended after `limit` are returned.
/// Blocking.
pub(super) fn end(processes: &BTreeSet<Identity>, limit: Duration) -> io::Result<Vec<Identity>> {
    let deadline = Instant::now() + limit;
    let mut handles = Vec::new();
    for identity in processes {
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
        assert_eq!(Stat::parse(line), Some(Stat { state: b'S', parent: 17, start: 123_456 }));
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
            prop_assert_eq!(Stat::parse(line.as_bytes()), Some(Stat { state: b'R', parent, start }));
        }
    }

    #[test]
    fn this_process_runs_and_another_of_its_number_does_not() {
        let own = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        assert!(own.runs().unwrap());
        assert!(!Identity { start: own.start + 1, ..own }.runs().unwrap());
    }

    #[test]
    fn marked_processes_and_their_children_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("/bin/sh")
            .args(["-c", "env -u KIYOT_INSTANCE sleep 1000 & echo started; wait"])
            .env(INSTANCE_VARIABLE, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line)
            .unwrap();
        let shell = Identity::of(i32::try_from(child.id()).unwrap()).unwrap().unwrap();
        let found = of_instance(dir.path(), Path::new("/no/netns"), None).unwrap();
        assert!(found.contains(&shell) && found.len() == 2, "{found:?}");
        assert_eq!(
            of_instance(&dir.path().join("other"), Path::new("/no/netns"), Some(shell)).unwrap(),
            found
        );
        assert_eq!(end(&found, Duration::from_secs(60)).unwrap(), []);
        child.wait().unwrap();
        assert_eq!(of_instance(dir.path(), Path::new("/no/netns"), None).unwrap(), BTreeSet::new());
        assert!(end(&found, Duration::from_secs(60)).unwrap().is_empty(), "again is fine");
    }
}
