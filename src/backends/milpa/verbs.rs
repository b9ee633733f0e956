//! What the kubelet sees: the CRI calls of pods in cells.
//!
//! Reads are answered from `view`, in memory. Everything that changes something is done in a task
//! that its caller's end does not end; what an answer promises is on disk before it is given. News
//! from cells come in by `watch` and `news`, and are ordered by `transition`.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError, RwLock, Weak},
    time::{Duration, Instant},
};

use kiyot_proto::{cri, store::ReportedExit};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

use super::{
    cells::{Cell, Cells},
    id::{CellId, ContainerId, SandboxId},
    images::Images,
    logs::Logs,
    resolver::Resolver,
    store::{Store, StoreError},
    streaming::Streaming,
    volumes::Volumes,
};
use crate::config::Policy;

mod abandon;
mod calls;
mod clock;
mod create_container;
mod dispatch;
mod exec;
mod exit;
mod failure;
mod features;
mod filter;
mod flight;
#[doc(hidden)]
pub mod fuzzing;
mod image;
mod measuring;
mod moved_pods;
mod news;
pub mod policy;
mod records;
mod remove;
mod restore;
mod restored;
mod returning;
mod rewrite;
mod run_sandbox;
mod seccomp;
mod settle;
mod snapshot;
mod start_container;
mod stop_container;
mod stop_sandbox;
mod transition;
mod view;
mod watch;

use flight::Flights;
use view::{Sandbox, View};

/// How long the tasks of calls may take to end when the daemon stops.
const ENDING: Duration = Duration::from_secs(5);

/// How long the first sample of what a sandbox or a container uses may take; without it its usage
/// begins with nothing.
const SAMPLE: Duration = Duration::from_secs(1);

/// What the verbs work with.
#[derive(Debug)]
pub struct Parts {
    /// The store.
    pub store: Store,
    /// Cells.
    pub cells: Arc<Cells>,
    /// Their images.
    pub images: Arc<Images>,
    /// Their volumes.
    pub volumes: Arc<Volumes>,
    /// Their logs.
    pub logs: Arc<Logs>,
    /// Exec, attach and port-forward.
    pub streaming: Arc<Streaming>,
    /// What becomes of pods that ask for what is the node's, until [`Verbs::set_policy`] says
    /// otherwise.
    pub rules: policy::Rules,
    /// How long a sandbox is kept that was made for a caller who was gone, and that nobody has
    /// asked for since.
    pub adopt_within: Duration,
    /// How long after the start the usage of pods of before is waited for.
    pub return_within: Duration,
    /// How long who asks for metrics waits for cells, when nobody has asked for long.
    pub measure_within: Duration,
}

impl Parts {
    /// The usual `adopt_within`: several rounds of a kubelet that tries again.
    pub const ADOPT_WITHIN: Duration = Duration::from_secs(180);
    /// The usual `return_within`: an agent dials every two seconds at least, and says what its pod
    /// uses as soon as it is watched. The usage of a cell that is silent for longer is not told
    /// anyway.
    pub const RETURN_WITHIN: Duration = Duration::from_secs(15);
    /// The usual `measure_within`: an agent tells them at once, and gives its containerd 0.9 s.
    pub const MEASURE_WITHIN: Duration = Duration::from_secs(2);
}

/// A sandbox's name: no two may be there with the same one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SandboxKey {
    namespace: String,
    name: String,
    uid: String,
    attempt: u32,
}

/// A container's name in its sandbox: one attempt at a time is made of it.
type ContainerKey = (SandboxId, String);

/// What is done for a cell until it is let go.
#[derive(Debug, Default)]
struct Watched {
    end: CancellationToken,
    /// Its name servers are asked.
    resolves: bool,
}

/// The verbs.
#[derive(Debug)]
pub struct Verbs {
    parts: Parts,
    /// What becomes of what is asked for from now on.
    rules: RwLock<policy::Rules>,
    view: View,
    launches: Arc<Flights<SandboxKey, cri::RunPodSandboxRequest, SandboxId>>,
    creations: Arc<Flights<ContainerKey, cri::CreateContainerRequest, ContainerId>>,
    /// Sandboxes whose making nobody has been told of, and since when.
    unclaimed: Mutex<HashMap<SandboxId, Instant>>,
    /// Containers whose end is being recorded, and the exit that the cell has reported.
    ending: Mutex<HashMap<ContainerId, Option<ReportedExit>>>,
    /// What the runtime of cells does.
    told: features::Told,
    /// Whether cells tell metrics.
    measuring: measuring::Measuring,
    /// Until then the cells of before are waited for.
    returned_by: Instant,
    /// Cells that are watched.
    watched: Mutex<HashMap<CellId, Watched>>,
    /// Asks name servers of the node for cells.
    resolver: Resolver,
    /// Pods whose next sandbox runs on the node.
    moved: moved_pods::MovedPods,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Verbs {
    /// Reads what is known from the store, and follows the news from cells from now on.
    pub async fn start(parts: Parts) -> Result<Arc<Self>, StoreError> {
        let verbs = Arc::new(Self {
            rules: RwLock::new(parts.rules),
            returned_by: Instant::now() + parts.return_within,
            parts,
            view: View::new(),
            launches: Arc::new(Flights::new()),
            creations: Arc::new(Flights::new()),
            unclaimed: Mutex::default(),
            ending: Mutex::default(),
            told: features::Told::default(),
            measuring: measuring::Measuring::default(),
            watched: Mutex::default(),
            resolver: Resolver::default(),
            moved: moved_pods::MovedPods::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let keeper: Weak<Self> = Arc::downgrade(&verbs);
        verbs.parts.logs.kept_by(keeper);
        // Subscribed first: what happens while the records are read is not missed.
        let events = verbs.parts.cells.events();
        verbs.restore().await?;
        verbs.owned(Arc::clone(&verbs).follow_news(events));
        verbs.owned(Arc::clone(&verbs).end_abandoned());
        Ok(verbs)
    }

    /// What becomes of pods that ask for what is the node's.
    fn rules(&self) -> policy::Rules {
        *self.rules.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what becomes of what is asked for from now on, by containers of pods that run too.
    /// Answers with what of a new one the provider's cells can't keep.
    pub fn set_policy(&self, policy: Policy) -> Vec<String> {
        let mut rules = self.rules.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = rules.policy != policy;
        rules.policy = policy;
        self.parts.volumes.set_host_path(policy.host_path);
        if is_new { rules.unmet() } else { Vec::new() }
    }

    /// Ends all tasks. Pods go on; what was not finished is taken up, or cleaned up, at the next
    /// start.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(ENDING, self.tasks.wait()).await.is_err() {
            tracing::warn!(tasks = self.tasks.len(), "Tasks of pods in cells did not end in time");
        }
    }

    /// Runs a task until the daemon stops.
    fn owned(&self, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        // Boxed, or the task would have room for several copies of it: it is moved from one future
        // into the next.
        let work = Box::pin(work);
        self.tasks.spawn(async move {
            // `None`: it was stopped.
            let _ = stop.run_until_cancelled(work).await;
        });
    }

    /// Does something to its end even if the caller goes, and waits for it until the caller's
    /// deadline.
    async fn detached<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Option<Instant>,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        let stop = self.stop.clone();
        let task = self.tasks.spawn(async move { stop.run_until_cancelled(work).await });
        let ended = async {
            match task.await {
                Ok(Some(result)) => result,
                Ok(None) => Err(Status::unavailable("the daemon is stopping")),
                Err(error) => Err(Status::internal(format!("{what}: its task failed: {error}"))),
            }
        };
        match deadline {
            None => ended.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline.into(), ended).await.unwrap_or_else(|_| {
                    Err(Status::deadline_exceeded(format!("{what} takes longer and goes on")))
                })
            }
        }
    }

    /// The cell of a sandbox; `UNAVAILABLE` if it is gone.
    fn cell_of(&self, sandbox: &Sandbox) -> Result<Cell, Status> {
        let cell = self.parts.cells.get(&sandbox.cell);
        cell.ok_or_else(|| {
            Status::unavailable(format!("cell {} of pod {} is gone", sandbox.cell, sandbox.pod))
        })
    }

    /// The cell of a sandbox if it is connected; `UNAVAILABLE` if not.
    async fn reachable_cell(
        &self,
        sandbox: &Sandbox,
        deadline: Option<Instant>,
    ) -> Result<Cell, Status> {
        let cell = self.cell_of(sandbox)?;
        calls::connected(&cell, &sandbox.pod, deadline).await?;
        Ok(cell)
    }
}
