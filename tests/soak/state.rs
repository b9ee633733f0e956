//! State that callers, kills and the watcher share: acknowledged objects, kills and findings.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::sync::RwLock;

use crate::plan::{Target, Work};

/// Bounds the remembered ids of removed objects. A removed object must not reappear.
const MAX_REMOVED: usize = 512;
/// Bounds the kept findings. The first finding ends the soak.
const MAX_FINDINGS: usize = 20;

/// The number of kills by kind of process.
pub(crate) type Kills = BTreeMap<Target, u64>;

/// A sandbox whose creation has succeeded.
#[derive(Debug, Clone)]
pub(crate) struct SandboxEntry {
    pub(crate) pod: String,
    pub(crate) cell: bool,
    /// The kills until the creation was requested.
    pub(crate) kills: Kills,
    pub(crate) stopping: bool,
    pub(crate) removing: bool,
}

/// A container whose creation has succeeded.
#[derive(Debug, Clone)]
pub(crate) struct ContainerEntry {
    pub(crate) sandbox: String,
    pub(crate) pod: String,
    pub(crate) name: String,
    pub(crate) work: Work,
    pub(crate) cell: bool,
    /// The kills until the creation was requested.
    pub(crate) kills: Kills,
    pub(crate) started: bool,
    pub(crate) stopping: bool,
    pub(crate) removing: bool,
}

/// The sandboxes and containers that the kubelet knows.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) sandboxes: HashMap<String, SandboxEntry>,
    pub(crate) containers: HashMap<String, ContainerEntry>,
    pub(crate) removed: VecDeque<String>,
}

impl Ledger {
    /// Allows a sandbox and its containers to stop from now on.
    pub(crate) fn allow_stop(&mut self, sandbox: &str) {
        if let Some(known) = self.sandboxes.get_mut(sandbox) {
            known.stopping = true;
        }
        for known in self.containers.values_mut().filter(|known| known.sandbox == sandbox) {
            known.stopping = true;
        }
    }

    /// Allows a container to stop from now on.
    pub(crate) fn allow_container_stop(&mut self, id: &str) {
        if let Some(known) = self.containers.get_mut(id) {
            known.stopping = true;
        }
    }

    /// Allows a container to be absent from now on.
    pub(crate) fn allow_container_removal(&mut self, id: &str) {
        if let Some(known) = self.containers.get_mut(id) {
            known.removing = true;
        }
    }

    /// Allows a sandbox and its containers to be absent from now on.
    pub(crate) fn allow_removal(&mut self, sandbox: &str) {
        if let Some(known) = self.sandboxes.get_mut(sandbox) {
            known.removing = true;
        }
        for known in self.containers.values_mut().filter(|known| known.sandbox == sandbox) {
            known.removing = true;
        }
    }

    /// Requires a sandbox and its containers to be absent from now on.
    pub(crate) fn require_absence(&mut self, sandbox: &str) {
        self.sandboxes.remove(sandbox);
        let containers: Vec<_> = self
            .containers
            .iter()
            .filter(|(_, known)| known.sandbox == sandbox)
            .map(|(id, _)| id.clone())
            .collect();
        for id in &containers {
            self.containers.remove(id);
        }
        self.removed.extend(containers.into_iter().chain([sandbox.to_owned()]));
        let excess = self.removed.len().saturating_sub(MAX_REMOVED);
        self.removed.drain(..excess);
    }
}

#[derive(Debug, Default)]
pub(crate) struct SoakState {
    /// True after the last kill.
    pub(crate) over: AtomicBool,
    pub(crate) pods: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) calls: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Locked for reading by calls that change a pod on the node, and for writing by kills of the
    /// node's containerd. If containerd 1.6 is killed while it creates a task, parts of the task
    /// stay on the node (shims, `runc init`, cgroups), with and without kiyot.
    pub(crate) node_lock: Arc<RwLock<()>>,
    ledger: Mutex<Ledger>,
    kills: Mutex<Kills>,
    findings: Mutex<Vec<String>>,
}

impl SoakState {
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no thread panics with this lock")
    }

    /// Returns the numbers of kills until now.
    pub(crate) fn kills(&self) -> Kills {
        self.kills.lock().expect("no thread panics with this lock").clone()
    }

    /// Counts a kill. Must be called before the process is killed.
    pub(crate) fn count_kill(&self, victim: Target) {
        *self.kills.lock().expect("no thread panics with this lock").entry(victim).or_default() +=
            1;
    }

    /// Returns whether a process of these kinds was killed since `before` was taken.
    pub(crate) fn killed_since(&self, before: &Kills, victims: &[Target]) -> bool {
        let now = self.kills();
        victims.iter().any(|victim| now.get(victim) != before.get(victim))
    }

    pub(crate) fn kills_are_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(crate) fn report(&self, finding: String) {
        let mut findings = self.findings.lock().expect("no thread panics with this lock");
        if findings.len() < MAX_FINDINGS && !findings.contains(&finding) {
            eprintln!("FINDING: {finding}");
            findings.push(finding);
        }
    }

    pub(crate) fn findings(&self) -> Vec<String> {
        self.findings.lock().expect("no thread panics with this lock").clone()
    }
}
