//! Resources that a test may leave on the host.

use std::{collections::BTreeSet, fmt, fs, path::Path};

use kiyot_linux::mountinfo;

use crate::command::output;

/// Processes, links, named network namespaces, mounts, firewall rules, cgroups and the forwarding
/// sysctl of this host, each in a line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers(BTreeSet<String>);

impl Leftovers {
    /// Lists the resources that exist now.
    pub fn of_host() -> Self {
        let mut all = BTreeSet::new();
        all.extend(processes().into_iter().map(|(pid, what)| format!("process {pid}: {what}")));
        all.extend(links().into_iter().map(|link| format!("link {link}")));
        all.extend(
            names(Path::new("/run/netns"))
                .into_iter()
                .map(|name| format!("network namespace {name}")),
        );
        all.extend(mounts().into_iter().map(|mount| format!("mount {mount}")));
        all.extend(rules());
        all.extend(cgroups().into_iter().map(|path| format!("control group {path}")));
        if let Ok(value) = fs::read_to_string("/proc/sys/net/ipv4/ip_forward") {
            all.insert(format!("sysctl net.ipv4.ip_forward={}", value.trim()));
        }
        Self(all)
    }

    /// Keeps the lines that contain any of these words.
    pub fn about(&self, words: &[String]) -> Self {
        Self(
            self.0
                .iter()
                .filter(|line| words.iter().any(|word| line.contains(word)))
                .cloned()
                .collect(),
        )
    }

    /// Removes process ids, so that a restarted process compares equal.
    pub fn without_pids(&self) -> Self {
        let without = |line: &String| match line.strip_prefix("process ") {
            Some(rest) => format!("process{}", rest.split_once(':').map_or("", |(_, what)| what)),
            None => line.clone(),
        };
        Self(self.0.iter().map(without).collect())
    }

    /// Returns the lines.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns whether there are no lines.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// Index of the number of threads in `stat`, counted after the name (proc_pid_stat(5)).
const THREADS: usize = 17;

/// Lists all living processes except this process: id, and command line with cgroups.
pub(crate) fn processes() -> Vec<(i32, String)> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let pids = names(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.parse::<i32>().ok())
        .filter(|pid| *pid != own);
    pids.filter_map(|pid| {
        let read = |file: &str| {
            fs::read(format!("/proc/{pid}/{file}"))
                .ok()
                .map(|bytes| String::from_utf8_lossy(&bytes).replace(['\0', '\n'], " "))
        };
        // The state is the first word after the name, which is in brackets. A zombie that is the
        // last thread of its process has ended, and only waits for its parent.
        let stat = read("stat")?;
        let stat: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        (*stat.first()? != "Z" || stat.get(THREADS)?.parse().is_ok_and(|threads: u32| threads > 1))
            .then_some(())?;
        Some((pid, format!("{}[{}]", read("cmdline")?, read("cgroup")?.trim())))
    })
    .collect()
}

/// Lists mount points in mount order.
pub(crate) fn mounts() -> Vec<String> {
    let mounts = mountinfo::read().unwrap_or_default();
    mounts.iter().map(|mount| mount.point.display().to_string()).collect()
}

/// The mount point of the cgroup hierarchies.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// Lists the cgroups of all hierarchies, parents first.
pub(crate) fn cgroups() -> Vec<String> {
    directories_below(Path::new(CGROUPS))
}

/// Lists the directories below a directory, parents first.
pub(crate) fn directories_below(directory: &Path) -> Vec<String> {
    fn walk(directory: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let path = entry.path();
                found.push(path.display().to_string());
                walk(&path, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, &mut found);
    found
}

/// Lists the links of this network namespace. /sys may show the links of another namespace.
pub(crate) fn links() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, _)| name.trim().to_owned())
        .collect()
}

/// Lists the firewall's chains and rules, without their counters.
fn rules() -> Vec<String> {
    let tables = ["nat", "filter"]
        .map(|table| (table, output("iptables-save", &["-t", table]).unwrap_or_default()));
    let lines = tables.iter().flat_map(|(table, text)| text.lines().map(move |line| (table, line)));
    let lines = lines.filter(|(_, line)| line.starts_with('-') || line.starts_with(':'));
    lines
        .filter(|(_, line)| !is_built_in(line))
        .map(|(table, line)| format!("rule {table} {}", line.split(" [").next().unwrap_or(line)))
        .collect()
}

/// Returns whether a line is a built-in chain: listing a table creates its built-in chains.
fn is_built_in(line: &str) -> bool {
    [":PREROUTING ", ":INPUT ", ":OUTPUT ", ":POSTROUTING ", ":FORWARD "]
        .iter()
        .any(|chain| line.starts_with(chain))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
