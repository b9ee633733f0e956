//! The CRI service of pods in cells: one file a method.
//!
//! Lists, statuses and statistics are answered from the read model. A call that changes a pod runs
//! in a task that outlives its caller, and its response is sent after its records are on disk.

use std::{
    future::Future,
    sync::{Arc, OnceLock, PoisonError, RwLock},
    time::{Duration, Instant},
};

use kiyot_config::Policy;
use kiyot_engine::{
    OrderKey, StoreError,
    id::{CellId, ContainerId, SandboxId},
    placement::{ApiRequests, PodRequests},
    provider::Capabilities,
};
use kiyot_proto::cri;
use tonic::Status;

use super::{
    cell_client,
    cells::{Cell, Cells},
    images::Images,
    logs::Logs,
    pods::{LookupError, Pods, Sandbox},
    policy::Rules,
    store::Store,
    streaming::Streaming,
    sync::{CellSync, ContainerKey, SyncParts},
    tasks::Tasks,
    volumes::Volumes,
};

mod cached_reads;
mod cell_info;
mod create_container;
mod dispatch;
mod exec;
mod exec_sync;
mod finish_first;
mod image_service;
mod metrics;
mod moved_pods;
mod pull_failures;
mod remove_container;
mod remove_sandbox;
mod reopen_log;
mod request;
mod retry_pauses;
mod run_sandbox;
mod seccomp_copy;
mod single_flight;
mod start_container;
mod stats_wait;
mod status_code;
mod stop_container;
mod stop_sandbox;
mod update_resources;

use moved_pods::MovedPods;
use pull_failures::PullFailures;
pub(crate) use pull_failures::{ImageFailures, PullFailure, is_same_image};
use retry_pauses::RetryPauses;
use run_sandbox::Launching;
use single_flight::SingleFlight;

/// Time limit of the tasks of calls when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The parts that the service works with.
#[derive(Debug)]
pub struct Parts {
    /// The store of records.
    pub store: Store,
    /// The cells.
    pub cells: Arc<Cells>,
    /// The images of cells.
    pub images: Arc<Images>,
    /// The volumes of cells.
    pub volumes: Arc<Volumes>,
    /// The logs of cells.
    pub logs: Arc<Logs>,
    /// Exec, attach and port-forward.
    pub streaming: Arc<Streaming>,
    /// The policy on host access, until [`CriService::set_policy`] changes it.
    pub policy: Policy,
    /// Time until a sandbox without a waiting caller is removed, unless another call names it.
    pub owner_timeout: Duration,
    /// Time after the start for which statistics wait for the usage of recovered pods.
    pub usage_timeout: Duration,
    /// Time for which the first scrape of metrics waits for cells.
    pub metrics_timeout: Duration,
}

impl Parts {
    /// The default of `owner_timeout`: time for several retries of a kubelet.
    pub const OWNER_TIMEOUT: Duration = Duration::from_secs(180);
    /// The default of `usage_timeout`: an agent dials at least every two seconds, and reports usage
    /// as soon as it is watched. Usage of a cell that is silent for longer is too old anyway.
    pub const USAGE_TIMEOUT: Duration = Duration::from_secs(15);
    /// The default of `metrics_timeout`: an agent reports at once, and gives its containerd 0.9 s.
    pub const METRICS_TIMEOUT: Duration = Duration::from_secs(2);
}

/// The CRI service of pods in cells.
#[derive(Debug)]
pub struct CriService {
    store: Store,
    cells: Arc<Cells>,
    images: Arc<Images>,
    volumes: Arc<Volumes>,
    logs: Arc<Logs>,
    streaming: Arc<Streaming>,
    policy: RwLock<Policy>,
    pods: Arc<Pods>,
    sync: Arc<CellSync>,
    launches: Arc<SingleFlight<OrderKey, Launching, SandboxId>>,
    creations: Arc<SingleFlight<ContainerKey, cri::CreateContainerRequest, ContainerId>>,
    /// Pods with their next sandbox on the node.
    moved: MovedPods,
    /// Pods with failed sandboxes.
    retry_pauses: RetryPauses,
    pull_failures: PullFailures,
    /// The pods' requests in the Kubernetes API, if the daemon has access.
    pod_requests: OnceLock<Arc<dyn PodRequests>>,
    /// End of the wait for usage of recovered pods.
    usage_deadline: Instant,
    /// Time for which the first scrape of metrics waits for cells.
    metrics_timeout: Duration,
    tasks: Tasks,
}

impl CriService {
    /// Recovers the pods from the records, and follows their cells from now on.
    pub async fn start(parts: Parts) -> Result<Arc<Self>, StoreError> {
        let usage_deadline = Instant::now() + parts.usage_timeout;
        let Parts { store, cells, images, volumes, logs, streaming, policy, .. } = parts;
        let (pods, tasks) = (Arc::new(Pods::new()), Tasks::default());
        let sync = CellSync::start(SyncParts {
            store: store.clone(),
            cells: Arc::clone(&cells),
            images: Arc::clone(&images),
            volumes: Arc::clone(&volumes),
            logs: Arc::clone(&logs),
            pods: Arc::clone(&pods),
            tasks: tasks.clone(),
            owner_timeout: parts.owner_timeout,
        })
        .await?;
        Ok(Arc::new(Self {
            store,
            cells,
            images,
            volumes,
            logs,
            streaming,
            policy: RwLock::new(policy),
            pods,
            sync,
            launches: Arc::new(SingleFlight::new()),
            creations: Arc::new(SingleFlight::new()),
            moved: MovedPods::default(),
            retry_pauses: RetryPauses::default(),
            pull_failures: PullFailures::default(),
            pod_requests: OnceLock::new(),
            usage_deadline,
            metrics_timeout: parts.metrics_timeout,
            tasks,
        }))
    }

    /// Returns the current rules on host access of a provider's cells.
    fn rules_of(&self, capabilities: Capabilities) -> Rules {
        let policy = *self.policy.read().unwrap_or_else(PoisonError::into_inner);
        Rules { policy, capabilities }
    }

    /// Returns the current rules of all providers, in the configured order.
    fn rules(&self) -> Vec<Rules> {
        self.cells.capabilities().map(|capabilities| self.rules_of(capabilities)).collect()
    }

    /// Returns the current rules of a sandbox's cell; after the cell's end, the rules of the first
    /// provider.
    fn rules_of_cell(&self, cell: &CellId) -> Option<Rules> {
        let cell = self.cells.get(cell).map(|cell| cell.capabilities);
        let capabilities = cell.or_else(|| self.cells.capabilities().next())?;
        Some(self.rules_of(capabilities))
    }

    /// Sets the policy on host access, also for new containers of running pods. Returns what a
    /// changed policy grants but the providers' cells lack.
    pub fn set_policy(&self, policy: Policy) -> Vec<String> {
        let before = {
            let mut current = self.policy.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, policy)
        };
        self.volumes.set_host_path(policy.host_path);
        let changed = self.rules().into_iter().filter(|_| before != policy);
        changed.flat_map(|rules| rules.unmet()).collect()
    }

    /// Sizes later pods by their requests in the Kubernetes API, if known.
    pub fn set_pod_requests(&self, requests: Arc<dyn PodRequests>) {
        // The daemon sets the requests once.
        let _already_set = self.pod_requests.set(requests);
    }

    /// Returns the requests of a pod in the Kubernetes API, as far as they are known.
    pub(super) fn known_requests(&self, uid: &str) -> Option<ApiRequests> {
        self.pod_requests.get().and_then(|requests| requests.known(uid))
    }

    /// Returns the failed pulls of a sandbox, without pulls that succeeded later.
    pub(super) fn pull_failures(&self, sandbox: &SandboxId) -> ImageFailures {
        self.pull_failures.of(sandbox)
    }

    pub(super) fn pods(&self) -> &Arc<Pods> {
        &self.pods
    }

    /// Ends all tasks. Pods continue; the next start resumes or cleans up unfinished work.
    pub async fn shutdown(&self) {
        if let Err(tasks) = self.tasks.shutdown(SHUTDOWN_TIMEOUT).await {
            tracing::warn!(tasks, "tasks of pods in cells did not end in time");
        }
    }

    /// Runs work to its end even if the caller leaves, and waits for it until the caller's
    /// deadline.
    fn detached<T: Send + 'static>(
        &self,
        method: &'static str,
        deadline: Option<Instant>,
        work: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> impl Future<Output = Result<T, Status>> {
        // Not async, so that the caller's future does not contain the work.
        let task = self.tasks.spawn(work);
        let ended = async move {
            match task.await {
                Ok(Some(result)) => result,
                Ok(None) => Err(Status::unavailable("the daemon is stopping")),
                Err(error) => Err(Status::internal(format!("{method}: its task failed: {error}"))),
            }
        };
        async move {
            let Some(deadline) = deadline else { return ended.await };
            tokio::time::timeout_at(deadline.into(), ended).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded(format!(
                    "{method} exceeded its deadline and continues"
                )))
            })
        }
    }

    /// Stops or removes a sandbox or container after its lookup. For an unknown one, the call
    /// succeeds, as in containerd.
    fn end_if_known<T, R: Default, W>(
        &self,
        method: &'static str,
        deadline: Option<Instant>,
        found: Result<T, LookupError>,
        end: impl FnOnce(T) -> W,
    ) -> impl Future<Output = Result<R, Status>>
    where
        W: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let ended = match found {
            Ok(target) => Ok(Some(self.detached(method, deadline, end(target)))),
            Err(LookupError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        async move {
            if let Some(ended) = ended? {
                ended.await?;
            }
            Ok(R::default())
        }
    }

    /// Returns the cell of a sandbox; UNAVAILABLE if it has ended.
    fn cell_of(&self, sandbox: &Sandbox) -> Result<Cell, Status> {
        let cell = self.cells.get(&sandbox.cell);
        cell.ok_or_else(|| {
            Status::unavailable(format!("cell {} of pod {} has ended", sandbox.cell, sandbox.pod))
        })
    }

    /// Returns the cell of a sandbox once it is connected; UNAVAILABLE at the deadline.
    async fn connected_cell(
        &self,
        sandbox: &Sandbox,
        deadline: Option<Instant>,
    ) -> Result<Cell, Status> {
        let cell = self.cell_of(sandbox)?;
        cell_client::connected(&cell, &sandbox.pod, deadline).await?;
        Ok(cell)
    }
}

/// Returns containerd's status for a call to a stopped sandbox.
fn not_running(sandbox: &SandboxId) -> Status {
    let id = sandbox.as_str();
    Status::failed_precondition(format!("sandbox container {id:?} is not running"))
}
