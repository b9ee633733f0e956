//! The lifecycle of cells.
//!
//! The engine (`engine`) is pure: orders, cells, evidence. `shared` carries out its effects and
//! records each step before taking it, so that a killed daemon finds every step it began. `listing`
//! reports the provider's instances to the engine.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::{StreamExt, future::join_all, stream::FuturesUnordered};
use kiyot_config::WarmPool;
use kiyot_engine::{
    OrderKey, StoreError, Wanted,
    engine::{
        Account, CellError, Effects, Engine, EngineConfig, Event, Journal, JournalSandbox, Limits,
        Offers, OrderSpec, PodPorts, ProviderKey, Seams, Step, Unusable,
    },
    id::{CellId, NoRandomness, SandboxId},
    placement::{
        self, AllRefused, Candidate, CellResources, Choice, Defaults, Needs, NoFit, Requested,
    },
    provider::{Attached, Capabilities, HostPort, MAX_HOST_PORTS, Owner, Provider, ProviderError},
    request::CellRequest,
};
use kiyot_link::bootstrap::Bootstrap;
use kiyot_proto::store::{Cordon, SandboxMeta};
use kiyot_values::error_chain::error_chain;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::{
    sync::{broadcast, oneshot, watch},
    time::{Instant, sleep},
};

use super::{
    gateway::CellLink,
    store::{Batch, Store, Table},
};
use crate::{annotations, metrics::Source};

mod admission;
mod budgets;
mod caller;
mod config;
mod history;
mod links;
mod listing;
mod metrics;
mod operator;
mod prices;
mod provider_calls;
mod providers;
mod restoration;
mod room;
mod shared;
mod warm;

#[cfg(test)]
mod tests;

pub(super) use caller::Caller;
pub use config::CellsConfig;
pub(crate) use history::{Occurrence, Subject};
pub use links::Links;
pub(crate) use operator::ProviderCatalogue;
use providers::CellSource;
pub use providers::Configured;
use shared::{Shared, now};

/// A running cell. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cell {
    /// The cell's id.
    pub id: CellId,
    /// The link to its agent.
    pub link: CellLink,
    /// The capabilities of its provider.
    pub capabilities: Capabilities,
}

/// A cell that is bound to a pod.
#[derive(Debug, Clone)]
pub struct BoundCell {
    /// The cell.
    pub cell: Cell,
    /// The sandbox id of the order, or of the earlier order that this order joined.
    pub sandbox: SandboxId,
    /// The attachment to the pod's network.
    pub attached: Attached,
}

/// An event of a cell.
#[derive(Debug, Clone)]
pub enum CellEvent {
    /// The control connection is established, perhaps again: start another watch of the cell.
    Connected(CellId),
    /// The cell waits in its warm pool for a pod.
    Warm(CellId),
    /// The cell's end is confirmed.
    Gone {
        /// The cell.
        cell: CellId,
        /// The reason, for the pod's status.
        reason: String,
    },
}

/// The time beyond the orphan timeout after which a cell without contact has stopped its pod: the
/// agent first has to notice the lost link, then end the containers.
const ORPHAN_GRACE: Duration = Duration::from_secs(120);

/// Bounds the wait for further providers after a provider has offerings for a pod.
const OFFERS_GRACE: Duration = Duration::from_secs(2);

/// Bounds the cells that a log line names.
const MAX_NAMED: usize = 10;

/// The daemon's implementation of the engine's seams.
#[derive(Debug)]
struct DaemonSeams {
    random: SystemRandom,
    links: Arc<OnceLock<Arc<dyn Links>>>,
}

impl Seams for DaemonSeams {
    fn random(&mut self, buffer: &mut [u8]) -> Result<(), NoRandomness> {
        self.random.fill(buffer).map_err(|_| NoRandomness)
    }

    fn bootstrap(&self, cell: &CellId, token: &str, is_remote: bool) -> Option<Bootstrap> {
        self.links.get().map(|links| links.bootstrap(cell, token, is_remote))
    }
}

/// All cells, and the only way to launch and terminate a cell.
#[derive(Debug)]
pub struct Cells {
    shared: Arc<Shared>,
    /// The default needs of pods, without the memory that cells need themselves.
    defaults: Defaults,
    warm: watch::Sender<Vec<WarmPool>>,
}

impl Cells {
    /// Loads the cells of the store. The gateway admits them from now on; their tasks start with
    /// [`Cells::serve`].
    pub async fn start(
        config: CellsConfig,
        store: Store,
        providers: Vec<Configured>,
    ) -> Result<Arc<Self>, StoreError> {
        let Owner { cluster, node, .. } = config.owner.clone();
        let engine_config = EngineConfig {
            limits: config.limits,
            launch_timeout: config.launch_timeout,
            token_ttl: config.token_ttl,
            boot_id: config.boot_id.clone(),
            refusal_pause: config.refusal_pause,
            retry_pause: config.retry_pause,
            spot_deadline: config.spot_deadline,
            orphan_timeout: config.orphan_timeout + ORPHAN_GRACE,
            healthy_timeout: config.healthy_timeout,
            owner: config.owner,
            tag_rules: config.tag_rules,
            take_over: config.take_over,
        };
        let sandboxes = store.load::<SandboxMeta>(Table::Sandboxes).await?;
        let journal = Journal {
            cells: store.load(Table::Cells).await?,
            orders: store.load(Table::Orders).await?,
            sandboxes: sandboxes.into_iter().map(journal_sandbox).collect(),
            costs: store.load(Table::Costs).await?,
        };
        let is_cordoned = !store.load::<Cordon>(Table::Cordon).await?.is_empty();
        let links = Arc::new(OnceLock::new());
        let seams = DaemonSeams { random: SystemRandom::new(), links: Arc::clone(&links) };
        let setups = providers.iter().map(Configured::setup).collect();
        let (mut engine, changes, unusable) =
            Engine::recover(engine_config, setups, Box::new(seams), journal, now());
        for record in unusable {
            match record {
                Unusable::NoCellRecord(sandbox) => tracing::error!(
                    cell = sandbox.cell,
                    sandbox = sandbox.id,
                    "cell has no readable record, cell ends"
                ),
                Unusable::CellKey(key) => {
                    tracing::error!(key, "cell record dropped, its key is not a cell id");
                    let mut batch = Batch::default();
                    batch.remove(Table::Cells, &key);
                    store.commit(batch).await?;
                }
            }
        }
        for (launched_in, cells) in engine.other_places() {
            let named: Vec<_> = cells.iter().take(MAX_NAMED).map(CellId::as_str).collect();
            tracing::error!(
                cells = cells.len(),
                among_them = named.join(", "),
                launched_in = &*launched_in,
                provider_looks_in = engine.provider_places(),
                cluster,
                node,
                "provider, region or endpoint changed while cells exist: their pods run on; \
                 their instances are listed and ended only with the earlier values"
            );
        }
        if is_cordoned {
            tracing::warn!("no cell is launched until the node's cells are uncordoned");
            engine.start_cordoned();
        }
        let defaults = providers.first().map(|first| first.rules.defaults).unwrap_or_default();
        let defaults = Defaults { overhead_mib: 0, ..defaults };
        let shared = Arc::new(Shared::new(store, providers, links, engine));
        shared.commit(&changes).await?;
        let warm = watch::Sender::new(config.warm);
        Ok(Arc::new(Self { shared, defaults, warm }))
    }

    /// Returns the source of the cells' metrics.
    pub fn metrics(&self) -> impl Source + use<> {
        metrics::CellMetrics::new(Arc::clone(&self.shared))
    }

    /// Sets the limits of further launches. Running cells continue, even above a lower limit.
    pub fn set_limits(&self, limits: Limits) {
        self.shared.with_core(|core, now| ((), core.engine.set_limits(limits, now)));
    }

    /// Sets the limit of silence of running and later cells whose pod sets no limit; `None` is no
    /// limit.
    pub fn set_healthy_timeout(&self, limit: Option<Duration>) {
        self.shared.with_core(|core, now| ((), core.engine.set_healthy_timeout(limit, now)));
    }

    /// Sets the time limit of further launches and the validity of their tokens.
    pub(super) fn set_launch_times(&self, launch_timeout: Duration, token_ttl: Duration) {
        self.shared.core().engine.set_launch_times(launch_timeout, token_ttl);
    }

    /// Sets the warm pools. Cells of other pools end.
    pub fn set_warm(&self, pools: &[WarmPool]) {
        self.warm.send_if_modified(|warm| {
            let is_changed = warm != pools;
            *warm = pools.to_vec();
            is_changed
        });
    }

    /// Starts all tasks with a gateway. Further calls do nothing.
    pub fn serve(&self, links: Arc<dyn Links>) {
        let shared = &self.shared;
        if shared.links.set(links).is_err() || shared.stop.is_cancelled() {
            return;
        }
        shared.with_core(|core, now| {
            // Before any task runs: a cell without a link counts as ended.
            let cells: Vec<CellId> = core.engine.ids().cloned().collect();
            for cell in cells {
                shared.ensure_link(core, &cell);
            }
            for source in shared.sources.all() {
                source.provider.adopt(core.engine.held(source.key()));
            }
            ((), core.engine.start(now))
        });
        for source in shared.sources.all() {
            self.run(source);
        }
        shared.tasks.spawn(Arc::clone(shared).run_timers());
        let warm = self.warm.subscribe();
        shared.tasks.spawn(warm::run(Arc::clone(shared), warm));
    }

    fn run(&self, source: Arc<CellSource>) {
        self.shared.tasks.spawn(restoration::run(Arc::clone(&source)));
        self.shared.tasks.spawn(listing::run(Arc::clone(&self.shared), source));
    }

    /// Configures providers, in the order in which equal offerings are preferred. An added provider
    /// launches once its instances are listed. A removed provider drains until its last cell has
    /// ended.
    pub(super) fn set_providers(&self, providers: Vec<Configured>) {
        let shared = &self.shared;
        let setups = providers.iter().map(Configured::setup).collect();
        let added = shared.with_core(|core, now| {
            // Under the same lock, so that each effect finds its provider.
            let added = shared.sources.set(providers);
            let effects = core.engine.set_providers(setups, now);
            for source in &added {
                source.provider.adopt(core.engine.held(source.key()));
            }
            (added, effects)
        });
        for source in added {
            self.run(source);
        }
        // Pools without a provider use the first; pools of an added provider are filled.
        self.warm.send_modify(|_| {});
    }

    /// Returns a provider that is configured or drains.
    pub(super) fn provider(&self, key: &str) -> Option<Arc<dyn Provider>> {
        self.shared.sources.get(key).map(|source| Arc::clone(&source.provider))
    }

    /// Makes absent cgroups of running pods, by `cgroup_parent`, if the pods' cells outlive a
    /// reboot of the node.
    pub(super) async fn restore_cgroups(&self, parents: &[String]) {
        if !parents.is_empty() {
            let all = self.shared.sources.all();
            let all = all.iter().map(|source| restoration::cgroups(&*source.provider, parents));
            join_all(all).await;
        }
    }

    /// Ends all tasks and waits for them. Cells continue to run, and the next start continues
    /// unfinished launches.
    pub async fn shutdown(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        let mut core = self.shared.core();
        // Dropping the senders tells callers that the daemon stops.
        core.orders.clear();
        core.enders.clear();
    }

    /// Adds an event of a pod (namespace/name), for operators and the Kubernetes API.
    pub(crate) fn add_pod_event(&self, pod: &str, uid: &str, status: &'static str, message: &str) {
        let subject = Subject::Pod { name: pod.to_owned(), uid: uid.to_owned() };
        self.shared.history.add(subject, status, message);
    }

    /// Launches a cell for a sandbox: records it, launches the instance, waits for its agent to
    /// enrol, and attaches the pod's network. After an error, nothing of the cell remains, or its
    /// record says what remains to be undone.
    ///
    /// The launch continues if the caller is dropped. An equal order joins it, also after a restart
    /// of the daemon. A launch without a waiting call ends after three minutes.
    pub async fn launch(
        self: &Arc<Self>,
        wanted: Arc<Wanted>,
        sandbox: SandboxId,
        timeout: Option<Duration>,
    ) -> Result<BoundCell, CellError> {
        let shared = &self.shared;
        if shared.links.get().is_none() || shared.stop.is_cancelled() {
            return Err(CellError::Starting);
        }
        let OrderKey { pod_uid, namespace, name: pod, .. } = &wanted.key;
        let subject = Subject::Pod { name: wanted.key.pod(), uid: pod_uid.clone() };
        // Before the provider is called: its error would not name the other pod.
        if let Some(taken) = shared.core().engine.taken_port(&wanted) {
            return Err(taken.into());
        }
        let offers = self.offers(&wanted).await;
        let spec =
            OrderSpec { wanted: Arc::clone(&wanted), sandbox, offers, timeout, is_joined: false };
        let (answer, answered) = oneshot::channel();
        let sandbox = shared.with_core(|core, now| {
            let is_ordered = core.engine.has_order(&wanted);
            if core.engine.is_cordoned() && !is_ordered {
                return (Err(CellError::Cordoned), Effects::new());
            }
            // Before a cell is launched: the kubelet retries until the other pod has ended.
            if let Some(taken) = core.engine.taken_port(&wanted) {
                return (Err(taken.into()), Effects::new());
            }
            // A launch under way and a running cell need no offerings: they continue even if the
            // offerings changed or can't be read.
            if let Some(error) = spec.refusal()
                && !is_ordered
                && !core.engine.has_warm_cell(&spec)
            {
                return (Err(error), Effects::new());
            }
            let is_joined = core.callers.contains_key(&wanted.key);
            let (sandbox, effects) = core.engine.order(OrderSpec { is_joined, ..spec }, now);
            core.orders.entry(sandbox.clone()).or_default().push(answer);
            let cell = core.engine.cell_of_order(&sandbox).map(tracing::field::display);
            tracing::info!(cell, %sandbox, pod, namespace, "cell launch started");
            shared.history.add(subject.clone(), "Ordered", &format!("sandbox {sandbox}"));
            (Ok(sandbox), effects)
        })?;
        let answer = answered.await.unwrap_or(Err(CellError::Stopping));
        if let Err(error) = &answer {
            shared.history.add(subject, "NoCell", &error_chain(error));
        }
        let (cell, attached) = answer?;
        let ended = "it ended when it was bound".to_owned();
        let cell = self.get(&cell).ok_or(CellError::Ended(cell, ended))?;
        Ok(BoundCell { cell, sandbox, attached })
    }

    /// Returns the offerings of all providers for a pod. After the first provider with offerings,
    /// the wait for the others is short.
    async fn offers(&self, wanted: &Wanted) -> Vec<Offers> {
        let all = self.shared.sources.configured();
        let mut pending: FuturesUnordered<_> =
            all.iter().map(|source| self.offers_of(source, wanted)).collect();
        let mut known = BTreeMap::new();
        let grace = sleep(OFFERS_GRACE);
        tokio::pin!(grace);
        let mut has_offerings = false;
        loop {
            let offers = tokio::select! {
                offers = pending.next() => offers,
                () = &mut grace, if has_offerings => None,
            };
            let Some(offers) = offers else { break };
            if !has_offerings && offers.candidates.is_ok() {
                has_offerings = true;
                grace.as_mut().reset(Instant::now() + OFFERS_GRACE);
            }
            known.insert(offers.provider, offers);
        }
        let late = |provider| {
            let error = ProviderError::too_slow("read its offerings", OFFERS_GRACE);
            Offers::none(provider, CellError::Provider(error))
        };
        let all = all.iter().map(|source| source.key());
        all.map(|key| known.remove(key).unwrap_or_else(|| late(key))).collect()
    }

    async fn offers_of(&self, source: &CellSource, wanted: &Wanted) -> Offers {
        let provider = source.key();
        if let Some(reason) = wanted.refused_by.get(provider) {
            return Offers::none(provider, CellError::Refused(reason.clone()));
        }
        let chosen = async {
            let catalogue = source.catalogue().await?;
            let parameters = source.provider.parameters(wanted).await?;
            let (needs, rules) = (source.needs(&wanted.needs), Arc::clone(&source.rules));
            Ok((Choice { catalogue, needs, rules }, parameters))
        };
        match chosen.await {
            Ok((choice, parameters)) => {
                let candidates = self.candidates(provider, &choice, &parameters);
                Offers { provider, candidates, parameters, choice: Some(choice) }
            }
            Err(error) => Offers::none(provider, CellError::Provider(error)),
        }
    }

    /// Returns a guard for a call that waits for the cell of an order.
    pub(super) fn caller(&self, order: OrderKey) -> Caller {
        Caller::new(&self.shared, order)
    }

    /// Returns the needs of a pod, by its annotations and its CRI request.
    pub fn needs(&self, request: &CellRequest, requested: &Requested) -> Needs {
        Needs::new(request, requested, &self.defaults)
    }

    /// Returns a provider's offerings that fit a pod and were not refused lately, the preferred
    /// first.
    fn candidates(
        &self,
        provider: ProviderKey,
        Choice { catalogue, needs, rules }: &Choice,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Vec<Candidate>, CellError> {
        // Ranked without the lock.
        let (now, machine) = (now(), needs.machine());
        let refusals = self.shared.core().engine.refusals_for(provider, parameters, &machine, now);
        let at = now.boot;
        let ranked = placement::rank(catalogue, needs, rules, &refusals.at(at));
        if !ranked.is_empty() {
            return Ok(ranked);
        }
        let fitting = placement::rank_refused(catalogue, needs, rules);
        let refused = AllRefused::new(&fitting, &refusals, at).map(CellError::AllRefused);
        Err(refused.unwrap_or_else(|| NoFit::new(catalogue, needs, rules).into()))
    }

    /// Ends the launch for a sandbox if the pod's annotations now choose another machine and the
    /// cell is not attached yet. The launch's callers get an error.
    pub(super) fn end_changed_launch(&self, order: &OrderKey, identity: &str) {
        self.shared
            .with_core(|core, now| ((), core.engine.end_changed_order(order, identity, now)));
    }

    /// Returns the cell with this id, unless its end is confirmed.
    pub fn get(&self, id: &CellId) -> Option<Cell> {
        let core = self.shared.core();
        let link = core.links.get(id)?.clone();
        // A cell of a provider that is not configured has the restrictions of the first.
        let source = self.shared.source_of(&core, id).or_else(|| self.shared.sources.first());
        Some(Cell { id: id.clone(), link, capabilities: source?.capabilities })
    }

    /// Returns whether a cell is being ended or has ended.
    pub(super) fn is_ending(&self, id: &CellId) -> bool {
        self.shared.core().engine.is_ending(id)
    }

    /// Returns whether a cell waits in a warm pool: no pod has taken it.
    pub(super) fn is_warm(&self, id: &CellId) -> bool {
        self.shared.core().engine.is_warm(id)
    }

    /// Returns the account of a cell: instance, price, cost and the steps of its start; `None`
    /// after its end is confirmed.
    pub(super) fn account(&self, id: &CellId) -> Option<Account> {
        self.shared.core().engine.account(id, now())
    }

    /// Returns the resources of a cell for the containers of its pod; `None` if they are unknown,
    /// or if they are the node's.
    pub(super) async fn resources(&self, id: &CellId) -> Option<CellResources> {
        let offering = self.account(id)?.offering?.offering;
        let source = self.shared.source_of(&self.shared.core(), id)?;
        let catalogue = source.catalogue().await.ok()?;
        let machine = catalogue.machine(&offering.instance_type)?;
        let memory_mib = machine.usable_mib().saturating_sub(source.rules.defaults.overhead_mib);
        let memory = memory_mib.saturating_mul(1 << 20);
        Some(CellResources { milli_cpus: machine.milli_cpus, memory })
    }

    /// Returns the capabilities of the configured providers, in order.
    pub(super) fn capabilities(&self) -> impl Iterator<Item = Capabilities> + use<> {
        self.shared.sources.configured().into_iter().map(|source| source.capabilities)
    }

    /// Records a step in the start of a cell's pod; ignores a repeated step.
    pub(super) fn reached(&self, id: &CellId, step: Step) {
        self.shared.handle(Event::Reached(id.clone(), step));
    }

    /// Returns the ids of all cells whose end is not confirmed.
    pub fn all(&self) -> Vec<CellId> {
        self.shared.core().engine.ids().cloned().collect()
    }

    /// Returns the reason of a cell's end while its tombstone is kept, for receivers that missed
    /// the event.
    pub fn gone_reason(&self, id: &CellId) -> Option<String> {
        self.shared.core().engine.gone_reason(id).map(ToOwned::to_owned)
    }

    /// Drops all tombstones except the ones to keep, and adds the removal of their records to
    /// the batch.
    pub fn forget_gone(&self, keep: impl Fn(&CellId) -> bool, batch: &mut Batch) {
        for forgotten in self.shared.core().engine.forget_gone(keep) {
            batch.remove(Table::Cells, forgotten.as_str());
        }
    }

    /// Terminates a cell. `Ok` means that its end is confirmed and nothing of it is left. With a
    /// provider whose ends take long, `Ok` means that the pod has ended and the cell shares nothing
    /// with the node. Terminating an unknown cell succeeds.
    ///
    /// After an error the termination is retried every few seconds, and at once by another call.
    pub async fn terminate(self: &Arc<Self>, id: &CellId, reason: &str) -> Result<(), CellError> {
        let shared = &self.shared;
        let answered = shared.with_core(|core, now| {
            if !core.engine.contains(id) {
                return (Ok(None), Effects::new());
            }
            if shared.stop.is_cancelled() {
                return (Err(CellError::Stopping), Effects::new());
            }
            let (answer, answered) = oneshot::channel();
            core.enders.entry(id.clone()).or_default().push(answer);
            let event = Event::Terminate { cell: id.clone(), reason: reason.into() };
            (Ok(Some(answered)), core.engine.handle(event, now))
        })?;
        let Some(answered) = answered else { return Ok(()) };
        answered.await.unwrap_or(Err(CellError::Stopping))
    }

    /// Terminates all cells of a pod; see [`Cells::terminate`].
    pub(super) async fn terminate_all_of(
        self: &Arc<Self>,
        pod_uid: &str,
        reason: &str,
    ) -> Result<(), CellError> {
        let cells: Vec<_> = self.shared.core().engine.blocking_cells(pod_uid).cloned().collect();
        for cell in cells {
            self.terminate(&cell, reason).await?;
        }
        Ok(())
    }

    /// Subscribes to the events of all cells. A receiver that lags must read everything again.
    pub fn events(&self) -> broadcast::Receiver<CellEvent> {
        self.shared.events.subscribe()
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

fn journal_sandbox((id, sandbox): (String, SandboxMeta)) -> JournalSandbox {
    let config = sandbox.config.unwrap_or_default();
    let metadata = config.metadata.unwrap_or_default();
    let requested = config.port_mappings.iter().filter(|mapping| mapping.host_port > 0);
    // Invalid mappings were refused before the sandbox was recorded.
    let ports: Vec<HostPort> =
        requested.take(MAX_HOST_PORTS).flat_map(HostPort::of_mapping).collect();
    let pod = format!("{}/{}", metadata.namespace, metadata.name);
    let request = annotations::parse(&config.annotations).unwrap_or_default();
    let networks = request.cloud_routes.iter().map(ToString::to_string).collect();
    let held = PodPorts { pod, ports, networks };
    JournalSandbox {
        ports: (!held.is_empty()).then(|| Box::new(held)),
        id,
        cell: sandbox.cell,
        pod_uid: metadata.uid,
        created_unix_nanos: sandbox.created_unix_nanos,
    }
}
