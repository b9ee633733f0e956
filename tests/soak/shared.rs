//! State that callers, kills and the watcher share: what was acknowledged, what was killed, and
//! what was found to be wrong.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::sync::RwLock;

use crate::plan::{Victim, Work};

/// Ids that were removed and must not come back: so many are remembered.
const MAX_REMOVED: usize = 512;
/// Findings that are kept; the first one ends the soak.
const MAX_FINDINGS: usize = 20;

/// How often each kind of process was killed until now.
pub(crate) type Kills = BTreeMap<Victim, u64>;

/// A sandbox that the kubelet was told of.
#[derive(Debug, Clone)]
pub(crate) struct KnownSandbox {
    pub(crate) pod: String,
    pub(crate) cell: bool,
    /// Kills when it was acknowledged.
    pub(crate) kills: Kills,
    pub(crate) stopping: bool,
    pub(crate) removing: bool,
}

/// A container that the kubelet was told of.
#[derive(Debug, Clone)]
pub(crate) struct KnownContainer {
    pub(crate) sandbox: String,
    pub(crate) pod: String,
    pub(crate) name: String,
    pub(crate) work: Work,
    pub(crate) cell: bool,
    /// Kills when its creation was acknowledged.
    pub(crate) kills: Kills,
    /// Was its start acknowledged?
    pub(crate) started: bool,
    pub(crate) stopping: bool,
    pub(crate) removing: bool,
}

/// Sandboxes and containers that were acknowledged and not removed.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) sandboxes: HashMap<String, KnownSandbox>,
    pub(crate) containers: HashMap<String, KnownContainer>,
    pub(crate) removed: VecDeque<String>,
}

impl Ledger {
    /// A sandbox and its containers may stop from here on.
    pub(crate) fn stops(&mut self, sandbox: &str) {
        if let Some(known) = self.sandboxes.get_mut(sandbox) {
            known.stopping = true;
        }
        for known in self.containers.values_mut().filter(|known| known.sandbox == sandbox) {
            known.stopping = true;
        }
    }

    /// A container may stop from here on.
    pub(crate) fn stops_container(&mut self, id: &str) {
        if let Some(known) = self.containers.get_mut(id) {
            known.stopping = true;
        }
    }

    /// A container may be absent from here on.
    pub(crate) fn removes_container(&mut self, id: &str) {
        if let Some(known) = self.containers.get_mut(id) {
            known.removing = true;
        }
    }

    /// A sandbox and its containers may be absent from here on.
    pub(crate) fn removes(&mut self, sandbox: &str) {
        if let Some(known) = self.sandboxes.get_mut(sandbox) {
            known.removing = true;
        }
        for known in self.containers.values_mut().filter(|known| known.sandbox == sandbox) {
            known.removing = true;
        }
    }

    /// A sandbox and its containers must be absent from here on.
    pub(crate) fn removed(&mut self, sandbox: &str) {
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

/// The state that all share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Nothing is killed any more.
    pub(crate) calm: AtomicBool,
    pub(crate) pods: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) calls: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Read by each call that changes a pod on the node, and written by a kill of the node's
    /// containerd: what containerd 1.6 is just making when it is killed stays on the node (shims,
    /// `runc init`, control groups), with and without kiyot.
    pub(crate) of_node: Arc<RwLock<()>>,
    ledger: Mutex<Ledger>,
    kills: Mutex<Kills>,
    findings: Mutex<Vec<String>>,
}

impl Shared {
    /// The ledger, for as long as it is looked at.
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no thread panics with this lock")
    }

    /// The kills until now.
    pub(crate) fn kills(&self) -> Kills {
        self.kills.lock().expect("no thread panics with this lock").clone()
    }

    /// Counts a kill, before it is done.
    pub(crate) fn kills_one(&self, victim: Victim) {
        *self.kills.lock().expect("no thread panics with this lock").entry(victim).or_default() +=
            1;
    }

    /// Has one of these been killed since?
    pub(crate) fn killed_since(&self, before: &Kills, victims: &[Victim]) -> bool {
        let now = self.kills();
        victims.iter().any(|victim| now.get(victim) != before.get(victim))
    }

    /// Is nothing killed any more?
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    /// Notes that something is wrong.
    pub(crate) fn finds(&self, finding: String) {
        let mut findings = self.findings.lock().expect("no thread panics with this lock");
        if findings.len() < MAX_FINDINGS && !findings.contains(&finding) {
            eprintln!("FINDING: {finding}");
            findings.push(finding);
        }
    }

    /// All that is wrong.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.findings.lock().expect("no thread panics with this lock").clone()
    }
}
