//! The inventory of everything that a soak must not leave behind, taken at the start and at the
//! end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use kiyot_testkit::{Kiyot, Leftovers, Node};
use redb::{ReadableDatabase, ReadableTableMetadata, TableHandle};

use crate::{
    chains::{ChainOwners, Owner},
    shims::ShimSockets,
};

/// The state of the daemon and the host at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Inventory {
    lines: BTreeSet<String>,
    files: BTreeMap<String, usize>,
}

impl Inventory {
    pub(crate) fn of(node: &Node, kiyot: &Kiyot<'_>) -> Self {
        own_logged_cells(node, kiyot);
        // All tests of the machine share its cgroups: cgroups of other tests are skipped.
        let is_group = |line: &&str| line.starts_with("control group");
        let mut lines: BTreeSet<String> = Leftovers::of_host()
            .without_pids()
            .lines()
            .filter(|line| !is_group(line))
            .map(str::to_owned)
            .collect();
        lines.extend(node.leftovers().lines().filter(is_group).map(str::to_owned));
        for (what, directory) in [
            ("state", kiyot.state()),
            ("the kubelet's", node.kubelet_directory()),
            ("log", node.pod_logs()),
            ("run", "/run".into()),
        ] {
            lines.extend(paths_below(directory).into_iter().map(|path| format!("{what} {path}")));
        }
        lines.extend(node.addresses().into_iter().map(|address| format!("address {address}")));
        lines.extend(flows());
        Self { lines, files: open_files(kiyot.pid()) }
    }

    /// Returns the lines that are in only one of the two inventories.
    pub(crate) fn differences(&self, later: &Self) -> Vec<String> {
        let more = later.lines.difference(&self.lines).map(|line| format!("+ {line}"));
        let less = self.lines.difference(&later.lines).map(|line| format!("- {line}"));
        let kinds: BTreeSet<_> = self.files.keys().chain(later.files.keys()).collect();
        let files = kinds.into_iter().filter_map(|kind| {
            let count = |of: &Self| of.files.get(kind).copied().unwrap_or(0);
            // Fewer open files are fine: the daemon opens some on demand.
            (count(later) > count(self)).then(|| {
                format!(
                    "+ open files of the daemon: {kind}: {} before, {} now",
                    count(self),
                    count(later)
                )
            })
        });
        more.chain(less).chain(files).collect()
    }
}

/// The differences of two inventories, without leftovers of the node's containerd.
///
/// A call that a killed daemon forwarded may still run in containerd when containerd is killed.
/// containerd 1.6 then forgets the task. The task's shim stays, with the control groups, mounts and
/// files that have the task's id in their names, or only the socket of the shim stays. A killed CNI
/// plugin leaves the chain of its sandbox. Both happen without kiyot too. Leftovers of cells remain
/// differences: their shims have another socket and their ids another form.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Remains {
    /// The differences. A line with a chain also has its sandbox.
    pub(crate) differences: Vec<String>,
    /// The number of tasks that the node's containerd has forgotten.
    pub(crate) tasks: usize,
    /// The number of sandboxes of the node's containerd that have left chains.
    pub(crate) chains: usize,
    /// The number of sockets that shims of the node's containerd have left.
    pub(crate) sockets: usize,
}

impl Remains {
    /// Sorts differences into leftovers of the node's containerd and others.
    pub(crate) fn of(
        node: &Path,
        owners: &ChainOwners,
        shims: &ShimSockets,
        differences: Vec<String>,
    ) -> Self {
        let socket = format!("-address {}/containerd.sock", node.display());
        let of_shim = |line: &str| {
            let id = line.starts_with("+ process") && line.contains(&socket);
            id.then(|| line.split(" -id ").nth(1)?.split(' ').next().map(str::to_owned)).flatten()
        };
        let mut names: BTreeSet<String> =
            differences.iter().filter_map(|line| of_shim(line)).collect();
        let tasks = names.len();
        let mut sandboxes = BTreeSet::new();
        for line in differences.iter().filter(|line| line.starts_with("+ rule")) {
            if let Some((chain, Owner::Node(sandbox))) = owners.owner_in(line) {
                names.insert(chain.to_owned());
                sandboxes.insert(sandbox.to_owned());
            }
        }
        let (stranded, others): (Vec<_>, Vec<_>) =
            differences.into_iter().partition(|line| names.iter().any(|name| line.contains(name)));
        let is_parent = |line: &String| {
            let beneath = format!("{line}/");
            stranded.iter().any(|line| line.starts_with(&beneath))
        };
        let socket_of_shim =
            |line: &String| line.strip_prefix("+ run ").is_some_and(|path| shims.contains(path));
        let sockets = others.iter().filter(|line| socket_of_shim(line)).count();
        let with_owner = |line: String| match owners.owner_in(&line) {
            Some((_, owner)) => format!("{line} ({owner:?})"),
            None => line,
        };
        let differences = others
            .into_iter()
            .filter(|line| !is_parent(line) && !socket_of_shim(line))
            .map(with_owner)
            .collect();
        Self { differences, tasks, chains: sandboxes.len(), sockets }
    }
}

/// Counts the records of each table of the store. The daemon must not run.
pub(crate) fn records(kiyot: &Kiyot<'_>) -> BTreeMap<String, u64> {
    let database =
        redb::Database::open(kiyot.state().join("store.redb")).expect("the store can be opened");
    let read = database.begin_read().expect("the store can be read");
    let tables: Vec<_> = read.list_tables().expect("the store has tables").collect();
    tables
        .into_iter()
        .map(|table| {
            let name = table.name().to_owned();
            let count = read.open_untyped_table(table).and_then(|table| Ok(table.len()?));
            (name, count.expect("a table can be counted"))
        })
        .collect()
}

/// Makes the node the owner of the cells in the daemon's log. The node then lists and removes their
/// resources.
pub(crate) fn own_logged_cells(node: &Node, kiyot: &Kiyot<'_>) {
    for cell in cells_in(&kiyot.log()) {
        node.owns(&cell);
    }
}

/// Returns the ids of the cells in a log.
fn cells_in(log: &str) -> BTreeSet<String> {
    let ids = log.split("cell=cell-").skip(1);
    ids.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default())
        .map(|id| format!("cell-{id}"))
        .collect()
}

/// Returns the resident memory of a process in KiB, or 0 if the process has exited.
pub(crate) fn resident(pid: u32) -> u64 {
    kiyot_testkit::resident_kib(pid).unwrap_or(0)
}

/// Returns the paths of all entries below a directory, without recursion: containers create trees
/// that are too deep for it.
fn paths_below(directory: PathBuf) -> Vec<String> {
    let (mut found, mut directories) = (Vec::new(), vec![directory]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            found.push(path.display().to_string());
            if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
                directories.push(path);
            }
        }
    }
    found
}

/// Returns the conntrack entries of UDP flows to the soak's host ports. They must end with the host
/// ports.
fn flows() -> Vec<String> {
    let text = fs::read_to_string("/proc/net/nf_conntrack").unwrap_or_default();
    let to_port = |line: &&str| {
        line.contains(" udp ")
            && line
                .split(' ')
                .find_map(|word| word.strip_prefix("dport=")?.parse::<u16>().ok())
                .is_some_and(|port| {
                    let first = crate::plan::FIRST_PORT;
                    let callers = u16::try_from(crate::plan::CALLERS).unwrap_or(0);
                    (first..first + callers * crate::plan::PORTS_PER_CALLER).contains(&port)
                })
    };
    text.lines()
        .filter(to_port)
        .map(|line| {
            // The remaining seconds change, and are left out.
            let words =
                line.split_whitespace().filter(|word| word.contains("=")).collect::<Vec<_>>();
            format!("flow udp {}", words.join(" "))
        })
        .collect()
}

/// Counts the open files of a process by kind.
fn open_files(pid: u32) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        let Ok(to) = fs::read_link(entry.path()) else { continue };
        let to = to.display().to_string();
        let kind = to.split(":[").next().unwrap_or(&to).to_owned();
        *kinds.entry(kind).or_default() += 1;
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arguments of a shim, with its socket.
    const SHIM: &str = "-namespace k8s.io -address /n/containerd.sock -id 12ab start";
    const SOCKET: &str = "+ run /run/containerd/s/\
                          ddd860fec9a3fd8aab85ea4ccc9f702324b33748e319c15c931ada8c9c60bacf";

    fn look(lines: &[&str], files: &[(&str, usize)]) -> Inventory {
        Inventory {
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            files: files.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect(),
        }
    }

    #[test]
    fn difference_names_each_line() {
        let before = look(&["link a", "mount b"], &[("socket", 3), ("pipe", 2)]);
        let later = look(&["link a", "mount c"], &[("socket", 4), ("pipe", 1)]);
        assert_eq!(
            before.differences(&later),
            ["+ mount c", "- mount b", "+ open files of the daemon: socket: 3 before, 4 now"]
        );
        assert!(before.differences(&before).is_empty());
    }

    #[test]
    fn stranded_task_of_containerd_is_ignored() {
        let left = |line: &str| line.to_owned();
        let all = vec![
            left(
                "+ process/usr/bin/containerd-shim-runc-v2 -id 12ab \
                 -address /n/containerd.sock [x]",
            ),
            left("+ control group /sys/fs/cgroup/kubepods/pod1"),
            left("+ control group /sys/fs/cgroup/kubepods/pod1/12ab"),
            left("+ control group /sys/fs/cgroup/kiyot/cell-x"),
            left(SOCKET),
            left("+ run /run/containerd/s/77"),
            left(
                "+ process/usr/bin/containerd-shim-runc-v2 -id 34cd \
                 -address /cell/containerd.sock [x]",
            ),
        ];
        let (node, owners) = (Path::new("/n"), ChainOwners::default());
        let shims = ShimSockets::of(SHIM);
        let remains = Remains::of(node, &owners, &shims, all.clone());
        let differences = vec![all[3].clone(), all[5].clone(), all[6].clone()];
        assert_eq!(remains, Remains { differences, tasks: 1, chains: 0, sockets: 1 });
        // The same holds without the shim, which may have been killed.
        let remains = Remains::of(node, &owners, &shims, vec![all[4].clone()]);
        assert_eq!(remains, Remains { sockets: 1, ..Remains::default() });
    }

    #[test]
    fn chain_of_a_node_sandbox_is_ignored_and_a_cells_chain_is_named() {
        let owners = ChainOwners::of("test", ["1234", "milpa5"].into_iter());
        let of_node = ["+ rule nat :CNI-2bbe0c48b91a7d1b8a6753a8 -".to_owned()];
        let ignored = Remains { chains: 1, ..Remains::default() };
        assert_eq!(
            Remains::of(Path::new("/n"), &owners, &ShimSockets::default(), of_node.to_vec()),
            ignored
        );
        let of_cell = ["+ rule nat :CNI-accead878188a66b5220ca99 -".to_owned()];
        let named = Remains {
            differences: vec![format!("{} (Cell(\"milpa5\"))", of_cell[0])],
            ..Remains::default()
        };
        assert_eq!(
            Remains::of(Path::new("/n"), &owners, &ShimSockets::default(), of_cell.to_vec()),
            named
        );
        let unknown = vec!["+ rule nat :CNI-0000000000000000000000ab -".to_owned()];
        let kept = Remains { differences: unknown.clone(), ..Remains::default() };
        assert_eq!(Remains::of(Path::new("/n"), &owners, &ShimSockets::default(), unknown), kept);
    }

    #[test]
    fn paths_of_a_deep_tree_are_found() {
        // The path of the deepest directory is shorter than PATH_MAX.
        const LEVELS: usize = 1_900;
        let root = tempfile::tempdir().unwrap();
        let deepest: PathBuf = root.path().join("d/".repeat(LEVELS));
        fs::create_dir_all(&deepest).unwrap();
        fs::write(deepest.join("f"), "").unwrap();
        let found = paths_below(root.path().to_owned());
        assert_eq!(found.len(), LEVELS + 1);
        assert_eq!(found.last(), Some(&deepest.join("f").display().to_string()));
        // `TempDir` would remove the tree by recursion.
        kiyot_linux::tree::remove_path(&root.keep()).unwrap();
    }

    #[test]
    fn cell_ids_in_a_log_are_found() {
        let log = "a cell=cell-abc2 x\nb cell=cell-def3\nc cell=cell-abc2";
        assert_eq!(cells_in(log).into_iter().collect::<Vec<_>>(), ["cell-abc2", "cell-def3"]);
    }

    #[test]
    fn differences_without_stranded_tasks_are_kept() {
        let all = vec!["+ run /run/containerd/s/77".to_owned(), "+ mount /x".to_owned()];
        let kept = Remains { differences: all.clone(), ..Remains::default() };
        let (owners, shims) = (ChainOwners::default(), ShimSockets::default());
        assert_eq!(Remains::of(Path::new("/n"), &owners, &shims, all), kept);
    }
}
