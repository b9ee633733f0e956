//! The nodeless backend: each pod runs in its own cell.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use futures::stream::BoxStream;
use kiyot_config::{MilpaBackend, Policy, ProviderKind};
use kiyot_engine::{
    StoreError, engine,
    id::PREFIX,
    placement,
    provider::{Owner, Provider, ProviderError, TagRules},
    request::{Architecture, RuleProviders},
};
use kiyot_link::clock::Clock;
use kiyot_local::{self as local, PauseImage, netns};
use prost::Message;
use tokio::task::spawn_blocking;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::{Backend, BackendName, CallPath, Declared, DecodedBackend, Features, Method};
use crate::metrics::{ApiCalls, Source, Traffic};

mod cell_client;
pub mod cells;
mod clock;
pub mod cri;
pub mod failure;
mod former_pods;
#[cfg(debug_assertions)]
#[path = "../../fuzz/inside/cells.rs"]
pub mod fuzzing;
pub mod gateway;
pub mod images;
pub mod inventory;
pub mod live_check;
pub mod logs;
mod mailbox;
mod pods;
pub mod policy;
mod provider_parts;
pub mod providers;
pub mod resolver;
pub mod send_rate;
pub mod store;
pub mod streaming;
mod sync;
mod tasks;
pub mod volumes;

use cells::{Cells, CellsConfig};
use cri::{CriService, Parts};
use former_pods::FormerPods;
use gateway::ca::{Ca, CaError};
use gateway::{AgentProgram, Gateway, GatewayConfig, GatewayError, Limits, TcpEndpoint};
use images::{Images, NodeImages, Registries};
use inventory::Inventory;
use logs::Logs;
use policy::Rules;
use provider_parts::{ProviderParts, configured};
use send_rate::SendRate;
use store::Store;
use streaming::Streaming;
use volumes::Volumes;

/// The declaration of the backend: the annotation `kubernetes.io/target-runtime: kiyot`, and
/// RuntimeClasses with the handler `kiyot`.
pub const DECLARED: Declared =
    Declared { target_runtimes: &["kiyot"], runtime_handlers: &["kiyot"] };
/// Time limit for all parts to end when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// An error at the start of the backend.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store failed.
    #[error("the state of backend {0}")]
    Store(BackendName, #[source] StoreError),
    /// The certificate authority of the cells failed.
    #[error("the certificates of backend {0}")]
    Authority(BackendName, #[source] CaError),
    /// The gateway of the cells failed.
    #[error("the gateway of backend {0}")]
    Gateway(BackendName, #[source] GatewayError),
    /// The program was built without a provider.
    #[error(
        "the provider of backend {0}: this program was built without {1:?} (cargo build --features \
         {1})"
    )]
    NotBuilt(BackendName, &'static str),
    /// A provider that a reload adds can't make cells.
    #[error("provider {1:?} of backend {0} can't make cells")]
    Unusable(BackendName, &'static str, #[source] ProviderError),
}

/// Returns the name of the node in Kubernetes, unless the kubelet is configured with another name.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().to_lowercase()
}

/// Opens the agent program that cells on other machines download. Only logs an error: other cells
/// and pods on the node don't need the program.
async fn agent_program(name: &BackendName, config: &MilpaBackend) -> Option<AgentProgram> {
    config.gateway.listen?;
    let path = config.gateway.agent.clone().unwrap_or_else(local::found_program);
    let opened = spawn_blocking(move || AgentProgram::open(&path)).await;
    match opened.ok()? {
        Ok(program) => {
            if program.is_dynamic() && !config.ec2.image_has_agent {
                tracing::info!(
                    backend = %name,
                    "agent program is linked dynamically: cells that download it need a C library \
                     as new as this node's; scripts/cell-image builds a static one (gateway.agent)"
                );
            }
            Some(program)
        }
        Err(error) => {
            tracing::error!(
                backend = %name,
                error = &error as &dyn std::error::Error,
                "agent program can't be served to cells (gateway.agent)"
            );
            None
        }
    }
}

/// Returns the path of the state directory with links resolved, as in the table of mounts.
async fn real_path(name: &BackendName, state_dir: &Path) -> PathBuf {
    let path = state_dir.to_owned();
    let resolved = spawn_blocking(move || path.canonicalize()).await;
    resolved.unwrap_or_else(|error| Err(io::Error::other(error))).unwrap_or_else(|error| {
        tracing::error!(
            backend = %name,
            path = %state_dir.display(),
            %error,
            "links in the path of state_dir not resolved"
        );
        state_dir.to_owned()
    })
}

/// The backend of pods in cells.
#[derive(Debug)]
pub struct Milpa {
    name: BackendName,
    answers: Arc<dyn DecodedBackend>,
    cri: Arc<CriService>,
    cells: Arc<Cells>,
    inventory: Inventory,
    gateway: Gateway,
    store: Store,
    metrics: Vec<Arc<dyn Source>>,
    provider_parts: ProviderParts,
    _checking: AbortOnDropHandle<()>,
    _following: AbortOnDropHandle<()>,
    _ending: AbortOnDropHandle<()>,
}

impl Milpa {
    /// Starts all parts. On return the recorded pods are known, and their cells may dial.
    /// `take_over` ends instances of this node that a daemon with another state directory launched.
    pub async fn start(
        name: &BackendName,
        config: &MilpaBackend,
        take_over: bool,
    ) -> Result<Arc<Self>, StartError> {
        let of_store = |error| StartError::Store(name.clone(), error);
        let store = Store::open(&config.state_dir).await.map_err(of_store)?;
        // Not beneath the resolved path: only the configured path is known to fit a socket's
        // address.
        let socket = config.state_dir.join("gateway.sock");
        let ca = Ca::load_or_make(&store)
            .await
            .map_err(|error| StartError::Authority(name.clone(), error))?;
        let node = NodeImages {
            socket: config.node_containerd.clone(),
            namespace: config.node_namespace.clone(),
        };
        let pause_image = PauseImage::read(config.pause_image.clone(), &config.state_dir);
        let registries = Registries::new(
            node.clone(),
            config.registry_config_dir.clone(),
            &config.state_dir,
            Arc::clone(&pause_image),
        );
        // Precedes the cells of warm pools, because their launch needs the node's pause image.
        let followed = Arc::clone(&registries);
        let following =
            AbortOnDropHandle::new(tokio::spawn(async move { followed.follow().await }));
        let node_name = config.node.clone().unwrap_or_else(host_name);
        let owner = Owner {
            cluster: config.cluster.clone().unwrap_or_default(),
            node: node_name.clone(),
            fingerprint: ca.sha256(),
        };
        let api_calls = Arc::new(ApiCalls::of_ec2());
        let agent = agent_program(name, config).await;
        let architecture = agent.as_ref().and_then(AgentProgram::architecture);
        let provider_parts = ProviderParts {
            state_dir: real_path(name, &config.state_dir).await,
            socket: socket.clone(),
            registries: Arc::clone(&registries),
            pause_image,
            owner: owner.clone(),
            api_calls: Arc::clone(&api_calls),
            agent: architecture.and_then(Architecture::named),
        };
        let mut providers = Vec::new();
        for kind in &config.providers {
            match provider_parts.make(config, *kind).await {
                Some(provider) => providers.push(configured(config, *kind, provider)),
                None if config.providers.len() == 1 => {
                    return Err(StartError::NotBuilt(name.clone(), kind.name()));
                }
                None => tracing::error!(
                    backend = %name,
                    provider = kind.name(),
                    "provider has no cells, this program was built without it"
                ),
            }
        }
        let rules = Rules::of(config);
        for unmet in rules.iter().flat_map(Rules::unmet).chain(config.gateway.warning()) {
            tracing::warn!(backend = %name, "{unmet}");
        }
        let all: Vec<_> = providers.iter().map(|it| Arc::clone(&it.provider)).collect();
        let checked = name.clone();
        let checking = AbortOnDropHandle::new(tokio::spawn(async move {
            let all = all.into_iter();
            join_all(all.map(|provider| provider_parts::check(checked.clone(), provider))).await;
        }));
        let cells_config = CellsConfig {
            limits: engine::Limits::of(config),
            launch_timeout: config.launch_timeout,
            token_ttl: config.token_ttl,
            orphan_timeout: config.orphan_timeout,
            healthy_timeout: config.healthy_limit(),
            boot_id: local::boot_id(),
            owner,
            tag_rules: TagRules::of(config),
            take_over,
            spot_deadline: config.placement.spot_deadline,
            warm: config.warm.clone(),
            ..CellsConfig::default()
        };
        let cells = Cells::start(cells_config, store.clone(), providers).await.map_err(of_store)?;
        let send_rate = Arc::new(SendRate::new(config.image_bytes_per_second));
        let gateway_config = GatewayConfig {
            socket,
            tcp: config.gateway.listen.map(|listen| TcpEndpoint {
                listen,
                advertise: config.gateway.advertised(),
                is_forwarded: config.gateway.is_forwarded(),
            }),
            agent: agent.map(|program| program.with_rate(Arc::clone(&send_rate))),
            ca,
            build_id: env!("CARGO_PKG_VERSION").to_owned(),
            orphan_timeout: config.orphan_timeout,
            clock: Clock::default(),
            limits: Limits {
                ephemeral_storage: config.ephemeral_storage_limit,
                unauthenticated_per_peer: config.gateway.max_unauthenticated_per_peer,
                ipv6_peer_bits: config.gateway.ipv6_peer_bits,
                ..Limits::default()
            },
        };
        let gateway = Gateway::start(gateway_config, cells.clone())
            .await
            .map_err(|error| StartError::Gateway(name.clone(), error))?;
        cells.serve(Arc::new(gateway.clone()));
        let images = Images::new(
            node,
            config.image_pull_progress_timeout,
            registries,
            config.image_source,
            Some(send_rate),
            Some(&*config.state_dir),
        );
        let volumes = Volumes::new(vec![config.kubelet_dir.clone()], config.policy.host_path);
        let logs = Logs::new();
        let (link_received, link_sent) = gateway.bytes();
        let (logs_bytes, volumes_bytes, images_bytes) =
            (logs.bytes(), volumes.bytes(), images.bytes());
        let traffic = Traffic {
            link_received,
            link_sent,
            logs: logs_bytes,
            volumes: volumes_bytes,
            images: images_bytes,
        };
        let metrics: Vec<Arc<dyn Source>> =
            vec![Arc::new(cells.metrics()), api_calls, Arc::new(traffic)];
        let parts = Parts {
            store: store.clone(),
            cells: Arc::clone(&cells),
            images,
            volumes,
            logs,
            streaming: Arc::new(Streaming::start().await),
            policy: config.policy,
            owner_timeout: Parts::OWNER_TIMEOUT,
            usage_timeout: Parts::USAGE_TIMEOUT,
            metrics_timeout: Parts::METRICS_TIMEOUT,
        };
        let cri = CriService::start(parts).await.map_err(of_store)?;
        let answers = Arc::new(Answers(Arc::clone(&cri)));
        let former = FormerPods {
            store: store.clone(),
            cri: Arc::clone(&cri),
            cells: Arc::clone(&cells),
            dir: provider_parts.state_dir.join("standalone"),
        };
        let ending = AbortOnDropHandle::new(tokio::spawn(former.end()));
        let inventory = Inventory::new(
            name.clone(),
            node_name,
            Arc::clone(&cells),
            Arc::clone(&cri),
            store.clone(),
        );
        Ok(Arc::new(Self {
            name: name.clone(),
            answers,
            cri,
            cells,
            inventory,
            gateway,
            store,
            metrics,
            provider_parts,
            _checking: checking,
            _following: following,
            _ending: ending,
        }))
    }

    /// Returns the sources of this backend's metrics.
    pub fn metrics(&self) -> Vec<Arc<dyn Source>> {
        self.metrics.clone()
    }

    /// Returns the inventory of the backend.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Answers a unary CRI call as if a kubelet had called.
    pub async fn call<A: Message + Default>(
        &self,
        method: Method,
        request: &impl Message,
        deadline: Option<Instant>,
    ) -> Result<A, Status> {
        self.cri.call_with(method, request, deadline).await
    }

    /// Sets the policy on host access.
    pub fn set_policy(&self, policy: Policy) {
        for unmet in self.cri.set_policy(policy) {
            tracing::warn!(backend = %self.name, "{unmet}");
        }
    }

    /// Sizes later pods by their requests in the Kubernetes API, if known.
    pub fn set_pod_requests(&self, requests: Arc<dyn placement::PodRequests>) {
        self.cri.set_pod_requests(requests);
    }

    /// Limits the cells of each namespace by budgets, initially by the recorded shares. Called
    /// before the first CRI call.
    pub async fn keep_budgets(&self) -> Result<(), StartError> {
        let kept = self.cells.keep_budgets().await;
        kept.map_err(|error| StartError::Store(self.name.clone(), error))
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Sets the limits of cells. Running cells go on, even above a lower limit. Warns if the node
    /// allows fewer cells.
    pub fn set_limits(&self, config: &MilpaBackend) {
        if config.has(ProviderKind::Netns) {
            netns::check_limits(config.max_cells);
        }
        self.cells.set_limits(engine::Limits::of(config));
    }

    /// Returns the providers that a reload has removed, but that still have cells.
    pub fn draining(&self) -> Vec<ProviderKind> {
        let views = self.cells.providers().into_iter();
        let draining = views.filter(|view| view.state == engine::ProviderState::Draining);
        draining.filter_map(|view| ProviderKind::named(&view.key)).collect()
    }

    /// Configures the providers of a reload, and makes new providers. After an error nothing has
    /// changed.
    pub async fn set_providers(
        &self,
        before: &MilpaBackend,
        config: &MilpaBackend,
    ) -> Result<(), StartError> {
        if before.providers == config.providers {
            return Ok(());
        }
        let mut providers = Vec::new();
        for kind in &config.providers {
            let provider = match self.cells.provider(kind.name()) {
                Some(running) => running,
                // The program was built without this provider, which the start has logged.
                None if before.has(*kind) => continue,
                None => self.added(config, *kind).await?,
            };
            providers.push(configured(config, *kind, provider));
        }
        if let (true, Some(kind)) = (providers.is_empty(), config.providers.first()) {
            return Err(StartError::NotBuilt(self.name.clone(), kind.name()));
        }
        self.cells.set_providers(providers);
        for provider in self.cells.providers() {
            let (key, state, cells) = (&*provider.key, provider.state.name(), provider.cells);
            tracing::info!(backend = %self.name, provider = key, state, cells, "provider set");
        }
        Ok(())
    }

    async fn added(
        &self,
        config: &MilpaBackend,
        kind: ProviderKind,
    ) -> Result<Arc<dyn Provider>, StartError> {
        let not_built = || StartError::NotBuilt(self.name.clone(), kind.name());
        let provider = self.provider_parts.make(config, kind).await.ok_or_else(not_built)?;
        let checked = provider_parts::check_added(&self.name, &*provider).await;
        checked.map_err(|error| StartError::Unusable(self.name.clone(), kind.name(), error))?;
        Ok(provider)
    }

    /// Sets the time limit of further launches and the validity of their tokens.
    pub fn set_launch_times(&self, config: &MilpaBackend) {
        self.cells.set_launch_times(config.launch_timeout, config.token_ttl);
    }

    /// Sets the warm pools. Cells of other pools end.
    pub fn set_warm(&self, config: &MilpaBackend) {
        self.cells.set_warm(&config.warm);
    }

    /// Sets how long the agent of a cell may be silent; `None` for no limit.
    pub fn set_healthy_timeout(&self, limit: Option<Duration>) {
        self.cells.set_healthy_timeout(limit);
    }

    /// Ends all tasks. Pods go on, and the next start recovers them.
    pub async fn shutdown(&self) {
        self.cri.shutdown().await;
        let rest = async {
            self.gateway.shutdown().await;
            self.cells.shutdown().await;
            self.store.close().await;
        };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, rest).await.is_err() {
            tracing::warn!(backend = %self.name, "parts of a backend did not end in time");
        }
    }
}

impl Backend for Milpa {
    fn name(&self) -> &BackendName {
        &self.name
    }

    fn declares(&self) -> Declared {
        DECLARED
    }

    fn path(&self) -> CallPath<'_> {
        CallPath::Decoded(&self.answers)
    }
}

/// Adapter of the CRI service to the calls of the proxy.
#[derive(Debug)]
struct Answers(Arc<CriService>);

#[async_trait]
impl DecodedBackend for Answers {
    fn owns(&self, id: &str) -> bool {
        !id.is_empty() && (id.starts_with(PREFIX) || PREFIX.starts_with(id))
    }

    fn snapshot(&self, method: Method, message: &[u8]) -> Option<Result<Bytes, Status>> {
        self.0.snapshot(method, message)
    }

    fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        self.0.leaves_to_node(message)
    }

    fn features(&self) -> Features {
        self.0.features()
    }

    fn owns_image(&self, method: Method, message: &[u8]) -> bool {
        self.0.owns_image(method, message)
    }

    fn reported_image(&self, reference: &str) -> Option<Bytes> {
        self.0.reported_image(reference)
    }

    fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        self.0.image_of_pods_like(message)
    }

    fn events(&self) -> BoxStream<'static, Result<Bytes, Status>> {
        self.0.events()
    }

    async fn list_metrics(&self, descriptors: Bytes) -> Bytes {
        self.0.list_metrics(&descriptors).await
    }

    async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        self.0.call(method, message, deadline).await
    }

    async fn run_by_rule(
        &self,
        message: Bytes,
        rule: RuleProviders,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        self.0.run_by_rule(&message, rule, deadline).await
    }
}
