//! `[backends.NAME.netns]`: cells made of namespaces of this node.

use std::path::PathBuf;

use kiyot_values::problems::Table;

use super::{LocalMachine, LocalNetwork, read};

const CONTAINERD: &str = "containerd";
const RUNC: &str = "runc";
/// With a running pod, a cell's own processes have 90 MiB resident: containerd 46, agent 21, shim
/// 15, launcher and init 8 of unshared memory.
const MEMORY_OVERHEAD: u64 = 96 << 20;

/// Cells made of namespaces of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns {
    /// Program `kiyot-cell`. By default the one beside kiyot, otherwise
    /// `/usr/libexec/kiyot/kiyot-cell`.
    pub cell_binary: Option<PathBuf>,
    /// Network of cells.
    pub network: LocalNetwork,
    /// Part of this node that cells may have.
    pub machine: LocalMachine,
    /// Program containerd of cells: a name on PATH or a path.
    pub containerd: PathBuf,
    /// Program runc of cells: a name on PATH or a path.
    pub runc: PathBuf,
    /// Memory of a cell's own processes in bytes.
    pub memory_overhead: u64,
    /// containerd's `restrict_oom_score_adj` in cells, for nodes where containerd may not lower an
    /// OOM score.
    pub restrict_oom_score_adj: bool,
}

impl Default for Netns {
    fn default() -> Self {
        Self {
            cell_binary: None,
            network: LocalNetwork::default(),
            machine: LocalMachine::default(),
            containerd: CONTAINERD.into(),
            runc: RUNC.into(),
            memory_overhead: MEMORY_OVERHEAD,
            restrict_oom_score_adj: false,
        }
    }
}

impl Netns {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut netns = Self::default();
        table.set("cell_binary", &mut netns.cell_binary, |field| read::path(field).map(Some));
        netns.network = LocalNetwork::read(&mut table);
        netns.machine = LocalMachine::read(&mut table);
        table.set("containerd", &mut netns.containerd, read::program);
        table.set("runc", &mut netns.runc, read::program);
        table.set("memory_overhead", &mut netns.memory_overhead, read::memory_overhead);
        table
            .set("restrict_oom_score_adj", &mut netns.restrict_oom_score_adj, |field| field.flag());
        table.finish();
        netns
    }
}
