//! `RunPodSandbox`: launches one cell for a pod, however often it is called.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_config::ProviderKind;
use kiyot_engine::{
    OrderKey, Wanted,
    engine::ProviderKey,
    id::SandboxId,
    placement::{ApiRequests, REQUESTS_TIMEOUT, Requested},
    provider::Attached,
    request::{CellRequest, RuleProviders},
};
use kiyot_proto::{cri, store as records};
use kiyot_values::error_chain::error_chain;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{
    CriService,
    request::{self as requests, HasResources},
    seccomp_copy,
    single_flight::Joined,
    status_code,
};
use crate::{
    annotations,
    backends::milpa::{
        cell_client::{self, CellClient, OPTIONAL_CALL_TIMEOUT},
        cells::{BoundCell, Cell},
        clock,
        pods::Sandbox,
        policy::{self, seccomp},
        store::{Batch, Table},
    },
};

/// Annotation of the kubelet with the source of the pod.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Value for pods of the API server. Static pods have other values.
const API_SOURCE: &str = "api";
/// Warning about a pod with variables in files of volumes. The kubelet reads these files on the
/// node, and then sends the variables with CreateContainer, or no CreateContainer.
const ENV_IN_FILES: &str = "variables in files of volumes (fileKeyRef) are read on the node, where \
                            an emptyDir of a cell is empty: optional ones are absent, and with \
                            others the kubelet does not create the container";
/// Time limit of the agent for the bind of its cell to the pod.
const BIND_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of a cell's containerd for the sandbox container: it has just started, and reads much
/// from disk.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// The launch of a sandbox.
#[derive(Debug)]
pub(crate) struct Launching {
    /// The kubelet's request.
    pub(crate) request: cri::RunPodSandboxRequest,
    /// The identity of the requested cell.
    identity: String,
}

impl CriService {
    /// Returns the requests of a pod in the Kubernetes API, if they are known in time.
    async fn api_requests(&self, config: &cri::PodSandboxConfig) -> Option<ApiRequests> {
        // A static pod has a different uid in the API.
        let source = config.annotations.get(CONFIG_SOURCE);
        if source.is_some_and(|source| source != API_SOURCE) {
            return None;
        }
        let (requests, metadata) = (self.pod_requests.get()?, config.metadata.as_ref()?);
        timeout(REQUESTS_TIMEOUT, requests.of_pod(&metadata.uid)).await.ok().flatten()
    }

    /// Returns the providers that a pod excludes, or whose cells lack what it requests, with the
    /// reasons. If no provider remains, the pod is refused.
    fn refused_by(
        &self,
        config: &cri::PodSandboxConfig,
        request: &CellRequest,
    ) -> Result<BTreeMap<ProviderKey, Arc<str>>, Status> {
        if let Some(contradiction) = request.contradiction() {
            return Err(Status::invalid_argument(contradiction));
        }
        let rules_of_all = self.rules();
        let mut refused = BTreeMap::new();
        for rules in &rules_of_all {
            let provider = rules.capabilities.provider;
            if let Some(reason) = rules.capabilities.refusal_of(request) {
                refused.insert(provider, reason.into());
            } else if let Err(refusal) = policy::check_sandbox(rules, config) {
                // With a single provider, the reason needs no name.
                if rules_of_all.len() == 1 {
                    return Err(status_code::of_refusal(refusal));
                }
                refused.insert(provider, refusal.to_string().into());
            }
        }
        if refused.len() < rules_of_all.len() {
            return Ok(refused);
        }
        let causes = refused.iter().map(|(provider, why)| format!("{provider}: {why}"));
        let mut why = causes.collect::<Vec<_>>().join("; ");
        let named = request.provider.map(ProviderKind::name);
        if named.is_some_and(|named| !refused.contains_key(named)) {
            let allowed: Vec<String> = refused.keys().map(|it| format!("{it:?}")).collect();
            why.push_str("; allowed: ");
            why.push_str(&allowed.join(", "));
        }
        Err(Status::invalid_argument(format!("no provider has a cell for the pod: {why}")))
    }

    /// Returns the wishes of a pod, from its CRI request, its routing rule and the Kubernetes API.
    async fn wanted(
        &self,
        config: &cri::PodSandboxConfig,
        rule: Option<RuleProviders>,
    ) -> Result<Wanted, Status> {
        let metadata = config
            .metadata
            .as_ref()
            .ok_or_else(|| Status::invalid_argument("RunPodSandbox without a config.metadata"))?;
        let identity = annotations::identity(&config.annotations, rule.as_ref());
        let request = annotations::parse(&config.annotations)
            .map_err(|error| Status::invalid_argument(error_chain(&error)))?;
        let request = CellRequest { rule, ..request };
        let refused_by = self.refused_by(config, &request)?;
        let api = self.api_requests(config).await;
        policy::check_gpus(&request, api.as_ref()).map_err(status_code::of_refusal)?;
        let of_cri = Requested::of_sandbox(config);
        let requested = api.map_or(of_cri, |api| of_cri.with_api(&api));
        let linux = config.linux.as_ref();
        Ok(Wanted {
            key: OrderKey {
                pod_uid: metadata.uid.clone(),
                namespace: metadata.namespace.clone(),
                name: metadata.name.clone(),
                attempt: metadata.attempt,
            },
            identity,
            labels: config.labels.clone().into_iter().collect(),
            needs: Arc::new(self.cells.needs(&request, &requested)),
            request,
            refused_by,
            ports: policy::host_ports(config).map_err(status_code::of_refusal)?,
            cgroup_parent: linux.map(|linux| linux.cgroup_parent.clone()).unwrap_or_default(),
        })
    }

    /// Runs a sandbox. If another call has begun a sandbox of this name and attempt, returns that
    /// sandbox.
    ///
    /// A sandbox is never half-made: after an error its cell has ended. The work outlives its
    /// caller.
    pub(super) async fn run_sandbox(
        self: &Arc<Self>,
        request: cri::RunPodSandboxRequest,
        rule: Option<RuleProviders>,
        deadline: Option<Instant>,
    ) -> Result<cri::RunPodSandboxResponse, Status> {
        let config = request
            .config
            .as_ref()
            .ok_or_else(|| Status::invalid_argument("RunPodSandbox without a config"))?;
        let wanted = Arc::new(self.wanted(config, rule).await?);
        let key = &wanted.key;
        // Dropped with the call: a launch that no call waits for may end early.
        let _caller = self.cells.caller(key.clone());
        loop {
            let (service, own) = (Arc::clone(self), Arc::clone(&wanted));
            let joined = self.launches.join_unless(
                |other| key.is_other_with_uid(&other.pod_uid, &other.namespace, &other.name),
                &self.tasks,
                key.clone(),
                Launching { request: request.clone(), identity: wanted.identity.clone() },
                // During the launch, annotations and the rule choose the machine; afterwards they
                // may change.
                |launched, new| {
                    requests::same_sandbox(&launched.request, &new.request)
                        && launched.identity == new.identity
                },
                |launching| {
                    Box::pin(async move { service.existing_or_new(&launching.request, own).await })
                },
            );
            let joined =
                joined.map_err(|other| taken_uid(key, &other.namespace, &other.name, "starts"))?;
            match joined {
                Joined::Same(waiter) => {
                    let id = waiter.outcome(deadline, "RunPodSandbox").await?;
                    self.sync.set_owned(&id);
                    return Ok(cri::RunPodSandboxResponse {
                        pod_sandbox_id: id.as_str().to_owned(),
                    });
                }
                // The pod changed during its start: the next round replaces the other sandbox.
                Joined::Other(waiter) => {
                    self.cells.end_changed_launch(key, &wanted.identity);
                    match waiter.outcome(deadline, "RunPodSandbox with another config").await {
                        Err(status) if status.code() == Code::DeadlineExceeded => {
                            return Err(status);
                        }
                        Ok(_) | Err(_) => {}
                    }
                }
            }
        }
    }

    async fn existing_or_new(
        self: Arc<Self>,
        request: &cri::RunPodSandboxRequest,
        wanted: Arc<Wanted>,
    ) -> Result<SandboxId, Status> {
        let key = &wanted.key;
        if let Some(existing) = self.sandbox_named(key) {
            let meta = existing.meta();
            let existing_request = cri::RunPodSandboxRequest {
                config: meta.config,
                runtime_handler: meta.runtime_handler,
            };
            match (existing.ready, requests::same_sandbox(&existing_request, request)) {
                (true, true) => return Ok(existing.id),
                (true, false) => {
                    tracing::info!(
                        sandbox = %existing.id,
                        pod = %existing.pod,
                        "replacing a sandbox whose config has changed"
                    );
                    let removed = self.sync.remove_sandbox(&existing.id).await;
                    removed.map_err(status_code::of_teardown)?;
                }
                (false, _) => {
                    let name =
                        format!("{}_{}_{}_{}", key.name, key.namespace, key.pod_uid, key.attempt);
                    let holder = existing.id.as_str();
                    return Err(Status::failed_precondition(format!(
                        "failed to reserve sandbox name {name:?}: name {name:?} is reserved for \
                         {holder:?}"
                    )));
                }
            }
        }
        // The order of a previous run of the daemon, without a waiting call.
        for other in self.cells.orders().into_iter().map(|order| order.key) {
            if key.is_other_with_uid(&other.pod_uid, &other.namespace, &other.name) {
                return Err(taken_uid(key, &other.namespace, &other.name, "starts"));
            }
        }
        for last in self.pods.sandboxes_of_pod(&key.pod_uid) {
            let cri::PodSandboxMetadata { namespace, name, .. } =
                last.item().metadata.unwrap_or_default();
            let is_other = key.is_other_with_uid(&last.uid, &namespace, &name);
            if is_other && last.ready {
                return Err(taken_uid(key, &namespace, &name, &format!("has {}", last.id)));
            }
            // The cell of a stopped sandbox may still be ending: never two cells of a pod.
            let may_end = is_other || (&namespace, &name) == (&key.namespace, &key.name);
            if may_end && !last.ready && self.cells.get(&last.cell).is_some() {
                let stopped = self.sync.stop_sandbox(&last.id).await;
                stopped.map_err(status_code::of_teardown)?;
            }
        }
        Box::pin(self.launch(request, wanted)).await
    }

    fn sandbox_named(&self, key: &OrderKey) -> Option<Sandbox> {
        self.pods.sandboxes_of_pod(&key.pod_uid).into_iter().find(|sandbox| {
            let metadata = sandbox.item().metadata.unwrap_or_default();
            (&metadata.namespace, &metadata.name, metadata.attempt)
                == (&key.namespace, &key.name, key.attempt)
        })
    }

    async fn launch(
        self: Arc<Self>,
        request: &cri::RunPodSandboxRequest,
        wanted: Arc<Wanted>,
    ) -> Result<SandboxId, Status> {
        let id = SandboxId::mint().map_err(status_code::of_randomness)?;
        let pod_key = (wanted.key.pod_uid.clone(), wanted.identity.clone());
        self.retry_pauses.check(&pod_key, Instant::now())?;
        let pod = wanted.key.pod();
        let unknown: Vec<&str> = request
            .config
            .iter()
            .flat_map(|config| annotations::unknown_keys(&config.annotations))
            .collect();
        if !unknown.is_empty() {
            let keys = annotations::shown_keys(&unknown);
            tracing::warn!(sandbox = %id, pod, keys, "annotations with unknown keys ignored");
        }
        // Without the caller's deadline, because a retry joins the launch. `launch_timeout` bounds
        // the launch, but not the end of a failed instance, for which the call also waits.
        let bound = self.cells.launch(wanted, id, None).await;
        let bound = bound.map_err(|error| status_code::of_cell(&error))?;
        // After a restart during the launch, `id` is the sandbox of the earlier call.
        let BoundCell { cell, sandbox: id, attached } = bound;
        let made = self.set_up_cell(&id, &cell, &attached, request, &pod);
        match Box::pin(made).await {
            Ok(()) => {
                let addresses = &attached.addresses;
                tracing::info!(sandbox = %id, cell = %cell.id, pod, ?addresses, "sandbox created");
                let rules = self.rules_of(cell.capabilities);
                for granted in
                    request.config.iter().flat_map(|config| policy::granted(&rules, config))
                {
                    tracing::info!(sandbox = %id, pod, "the pod {granted}");
                }
                if self.known_requests(&pod_key.0).is_some_and(|it| it.has_env_in_files) {
                    tracing::warn!(sandbox = %id, pod, "{ENV_IN_FILES}");
                    self.cells.add_pod_event(&pod, &pod_key.0, "EnvInFiles", ENV_IN_FILES);
                }
                self.sync.add_orphan(&id);
                self.sync.watch(&cell.id);
                self.retry_pauses.clear(&pod_key);
                Ok(id)
            }
            Err(status) => {
                tracing::warn!(
                    sandbox = %id,
                    cell = %cell.id,
                    pod,
                    status = status.message(),
                    "sandbox not created, ending its cell"
                );
                self.retry_pauses.add(pod_key, &status, Instant::now());
                match self.cells.terminate(&cell.id, "its sandbox could not be made").await {
                    Ok(()) => Err(status),
                    Err(error) => Err(Status::new(
                        status.code(),
                        format!(
                            "{}; and its cell {} could not be ended yet: {}",
                            status.message(),
                            cell.id,
                            error_chain(&error)
                        ),
                    )),
                }
            }
        }
    }

    /// Binds a cell to the pod, runs the sandbox in it, and records it.
    async fn set_up_cell(
        &self,
        id: &SandboxId,
        cell: &Cell,
        attached: &Attached,
        request: &cri::RunPodSandboxRequest,
        pod: &str,
    ) -> Result<(), Status> {
        let config = request.config.clone().unwrap_or_default();
        let hello = cell_client::connected(cell, pod, None).await?;
        let rules = self.rules_of(cell.capabilities);
        // The policy may have changed since the call began.
        policy::check_sandbox(&rules, &config).map_err(status_code::of_refusal)?;
        let resolvers = policy::forwarded_resolvers(&rules.policy, &config);
        let node = self.images.node_settings().await;
        let mut bind = requests::bind(&config, &resolvers, attached.network.as_ref(), &node);
        if rules.capabilities.own_kernel {
            bind.registries = self.images.registry_files().await;
            bind.proxies = self.images.proxies();
        }
        let client = CellClient::new(cell);
        self.sync.rehearsal_ended(&cell.id).await;
        client.bind(BIND_TIMEOUT, bind).await?;
        let pause = self.images.ensure_pause(cell).await;
        self.sync.release_if_ended(cell);
        pause?;
        let profile = seccomp::node_profile_of_sandbox(&config);
        let profile = seccomp_copy::copy(cell, &hello.pod_dir, profile).await?;
        let cgroup_parent = requests::cgroup_parent(&config, rules.capabilities.own_kernel);
        let mut cell_request =
            requests::run_sandbox(&config, &hello.pod_dir, &resolvers, &cgroup_parent, profile);
        if rules.capabilities.own_kernel {
            cell_request = cell_request.without_node_hardware();
        }
        let response = client.run_pod_sandbox(RUN_TIMEOUT, cell_request).await?;
        let latest =
            config.metadata.as_ref().map_or(0, |metadata| self.pods.latest_of_pod(&metadata.uid));
        let meta = records::SandboxMeta {
            id: id.as_str().to_owned(),
            cell: cell.id.as_str().to_owned(),
            cell_sandbox: cell_client::checked_id(response.pod_sandbox_id)?,
            config: Some(config),
            runtime_handler: request.runtime_handler.clone(),
            created_unix_nanos: clock::now_after(latest),
            addresses: attached.addresses.iter().map(ToString::to_string).collect(),
            resolvers,
            current_annotations: Default::default(),
            standalone: false,
            cgroup_parent,
            replaced_files: Vec::new(),
        };
        let mut batch = Batch::default();
        batch.put(Table::Sandboxes, id.as_str(), &meta);
        batch.put(
            Table::SandboxStatuses,
            id.as_str(),
            &records::SandboxStatus { ready: true, reason: String::new() },
        );
        let usage = cri::PodSandboxStatsRequest { pod_sandbox_id: meta.cell_sandbox.clone() };
        let sample = client.pod_sandbox_stats(OPTIONAL_CALL_TIMEOUT, usage);
        let (kept, sample, ()) = tokio::join!(
            self.store.commit(batch),
            sample,
            Box::pin(self.sync.features.learn(cell))
        );
        kept.map_err(|error| status_code::of_store(&error))?;
        let inserted =
            self.pods.insert_sandbox(&meta, true).map_err(|error| status_code::of_id(&error))?;
        // From here on the sandbox's usage is listed.
        self.pods.set_first_sandbox_usage(
            &inserted,
            sample.ok().and_then(|answer| answer.stats),
            Instant::now(),
        );
        // Checked after the insertion, because the event of a cell that ends just now may come
        // first.
        if self.cells.get(&cell.id).is_none() {
            if let Ok(sandbox) = self.pods.sandbox(id.as_str()) {
                let removed = self.sync.records.remove_sandbox(&sandbox).await;
                removed.map_err(|error| status_code::of_store(&error))?;
            }
            return Err(Status::unavailable(format!(
                "cell {} of pod {pod} ended: {}",
                cell.id,
                self.sync.end_reason(&cell.id)
            )));
        }
        Ok(())
    }
}

/// Returns the error for a pod with the uid of another pod: volumes, cgroups and proofs of ends are
/// found by uid.
fn taken_uid(key: &OrderKey, namespace: &str, name: &str, state: &str) -> Status {
    Status::failed_precondition(format!(
        "uid {:?} of pod {}/{} belongs to pod {namespace}/{name}, which {state}; allowed: a uid of \
         its own, or the other pod stopped and removed first",
        key.pod_uid, key.namespace, key.name
    ))
}
