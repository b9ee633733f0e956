//! A provider and a gateway that act as a test says, and keep a journal.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_engine::{
    OrderKey, Wanted,
    engine::Limits,
    id::{CellId, SandboxId},
    placement::{Catalogue, Market, Offering},
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, InstanceState,
        LaunchSpec, Provider, ProviderError, Termination, Terminations,
    },
};
use kiyot_link::{
    bootstrap::{Bootstrap, GatewayAddress},
    channel::Slot,
};
use kiyot_local::netns;
use kiyot_proto::{cell::HelloReply, store};
use ring::digest::{SHA256, digest};
use tokio::sync::Semaphore;

use crate::backends::milpa::{
    cells::{BoundCell, Cells, CellsConfig, Configured, Links},
    gateway::{Admission, CellLink, ControlChannel},
    store::{Batch, Store, Table},
};

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// The longest wait of a test for an expected state.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The outcomes of the next calls of a kind; without an outcome, a call succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    /// Fails without an effect.
    Fail,
    /// Fails after the effect.
    FailDone,
    /// Has the effect and never answers.
    Hang,
}

#[derive(Debug)]
pub(super) struct Played {
    pub(super) listing_period: Duration,
    pub(super) journal: Mutex<Vec<String>>,
    pub(super) instances: Mutex<BTreeMap<InstanceId, bool>>,
    pub(super) lists: AtomicUsize,
    pub(super) acts: Mutex<BTreeMap<&'static str, VecDeque<Act>>>,
    /// The place of instances that outlive the node; `Some("")` while it is unknown.
    pub(super) shared: Mutex<Option<&'static str>>,
}

impl Played {
    pub(super) fn new(listing_period: Duration) -> Self {
        Self {
            listing_period,
            journal: Mutex::default(),
            instances: Mutex::default(),
            lists: AtomicUsize::new(0),
            acts: Mutex::default(),
            shared: Mutex::default(),
        }
    }

    pub(super) fn act(&self, call: &'static str, acts: &[Act]) {
        locked(&self.acts).entry(call).or_default().extend(acts);
    }

    /// Returns the calls so far, without lists and without cell ids.
    pub(super) fn calls(&self) -> Vec<String> {
        locked(&self.journal).clone()
    }

    pub(super) fn end(&self, instance: &str, listed: bool) {
        let mut instances = locked(&self.instances);
        let instance = InstanceId(instance.to_owned());
        if listed {
            instances.insert(instance, false)
        } else {
            instances.remove(&instance)
        };
    }

    async fn called(&self, call: &'static str, done: impl FnOnce()) -> Result<(), ProviderError> {
        locked(&self.journal).push(call.to_owned());
        let act = locked(&self.acts).get_mut(call).and_then(VecDeque::pop_front);
        let failure = ProviderError::transient(format!("played {call}"), "as the test says");
        match act {
            None => done(),
            Some(Act::Fail) => return Err(failure),
            Some(Act::FailDone) => {
                done();
                return Err(failure);
            }
            Some(Act::Hang) => {
                done();
                Semaphore::new(0).acquire().await.map(|_| ()).unwrap();
            }
        }
        Ok(())
    }
}

fn offering() -> Offering {
    Offering {
        instance_type: "played".to_owned(),
        zone: "here".to_owned(),
        market: Market::OnDemand,
    }
}

fn instance(id: &InstanceId, running: bool) -> Instance {
    let state = if running { InstanceState::Running } else { InstanceState::Stopped };
    Instance::new(id.clone(), CellId::parse(&id.0[2..]).unwrap(), offering(), state)
}

/// Returns the provider's name for a cell's instance.
pub(super) fn instance_of(cell: &CellId) -> String {
    format!("i-{cell}")
}

#[async_trait]
impl Provider for Played {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            provider: "played",
            own_kernel: true,
            own_users: true,
            own_devices: true,
            listing_period: self.listing_period,
            ends_with_node: locked(&self.shared).is_none(),
            ..netns::CAPABILITIES
        }
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        match locked(&self.acts).get_mut("catalogue").and_then(VecDeque::pop_front) {
            None => Ok(Catalogue::any_size(offering())),
            Some(_) => Err(ProviderError::transient("played catalogue", "as the test says")),
        }
    }

    async fn launch(&self, spec: &LaunchSpec, _token: &str) -> Result<Instance, ProviderError> {
        let id = InstanceId(instance_of(&spec.cell));
        self.called("launch", || {
            locked(&self.instances).insert(id.clone(), true);
        })
        .await?;
        Ok(instance(&id, true))
    }

    async fn attach(
        &self,
        _instance: &InstanceId,
        _to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        self.called("attach", || {}).await?;
        Ok(Attached::already_made(vec![IpAddr::from([10, 0, 0, 7])]))
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        let instances = locked(&self.instances);
        Ok(instances.iter().map(|(id, running)| instance(id, *running)).collect())
    }

    fn shared_place(&self) -> Option<String> {
        locked(&self.shared).filter(|place| !place.is_empty()).map(str::to_owned)
    }

    async fn has_instances_of(&self, node: &str) -> Result<bool, ProviderError> {
        Ok(node == "other")
    }

    async fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        let running = locked(&self.instances).get(id).copied();
        running
            .map(|running| instance(id, running))
            .ok_or_else(|| ProviderError::without_cause(ErrorClass::NotFound, "played describe"))
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        let has_acts = locked(&self.acts).get("detach").is_some_and(|acts| !acts.is_empty());
        if has_acts { self.called("detach", || {}).await } else { Ok(()) }
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let done = self
            .called("terminate", || {
                locked(&self.instances).retain(|id, _| !instances.contains(id));
            })
            .await
            .map(|()| Termination::Confirmed);
        instances.iter().map(|instance| (instance.clone(), done.clone())).collect()
    }

    async fn console(&self, _instance: &InstanceId) -> Result<String, ProviderError> {
        self.called("console", || {}).await?;
        Ok("\u{1b}lots of words\nkernel\u{7} panic\n".to_owned())
    }

    async fn check(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}

/// The gateway; remembers the tokens of cells.
#[derive(Debug, Default)]
pub(super) struct PlayedLinks {
    pub(super) tokens: Mutex<BTreeMap<CellId, String>>,
    pub(super) forgotten: Mutex<Vec<CellId>>,
    pub(super) peer: Mutex<Option<IpAddr>>,
}

#[async_trait]
impl Links for PlayedLinks {
    fn link(&self, _cell: &CellId) -> CellLink {
        CellLink {
            control: ControlChannel::new("control"),
            bulk: Slot::new("bulk").channel(),
            lines: Arc::default(),
        }
    }

    fn bootstrap(&self, cell: &CellId, token: &str, _: bool) -> Bootstrap {
        locked(&self.tokens).insert(cell.clone(), token.to_owned());
        Bootstrap {
            cell: cell.to_string(),
            gateway: GatewayAddress::Unix("/nowhere".into()),
            ca_sha256: String::new(),
            token: token.to_owned(),
            orphan_timeout_secs: 1,
            agent: None,
        }
    }

    fn peer_address(&self, _cell: &CellId) -> Option<IpAddr> {
        *locked(&self.peer)
    }

    fn forget(&self, cell: &CellId) {
        locked(&self.forgotten).push(cell.clone());
    }

    async fn shut_down(&self, _cell: &CellId) -> bool {
        false
    }
}

/// A launch in its own task.
pub(super) type Launching = tokio::task::JoinHandle<Result<BoundCell, super::CellError>>;

/// The cells of a daemon, and the state that outlives the daemon.
pub(super) struct World {
    pub(super) cells: Arc<Cells>,
    pub(super) provider: Arc<Played>,
    pub(super) links: Arc<PlayedLinks>,
    pub(super) store: Store,
    pub(super) config: CellsConfig,
    _dir: tempfile::TempDir,
}

/// Returns the wishes of a pod.
pub(super) fn wanted(pod_uid: &str) -> Arc<Wanted> {
    let key = OrderKey { pod_uid: pod_uid.into(), ..OrderKey::default() };
    Arc::new(Wanted { key, ..Wanted::default() })
}

/// Returns a configuration without long waits.
fn providers(played: &Arc<Played>) -> Vec<Configured> {
    vec![Configured::new(Arc::clone(played) as _)]
}

pub(super) fn config() -> CellsConfig {
    CellsConfig {
        limits: Limits { max_cells: 3, ..Limits::default() },
        launch_timeout: PATIENCE,
        token_ttl: PATIENCE,
        orphan_timeout: PATIENCE,
        boot_id: "this boot".into(),
        retry_pause: Duration::from_millis(10),
        ..CellsConfig::default()
    }
}

impl World {
    pub(super) async fn new(config: CellsConfig) -> Self {
        Self::with_listing_period(config, Duration::from_millis(10)).await
    }

    pub(super) async fn with_listing_period(config: CellsConfig, period: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let (provider, links) = (Arc::new(Played::new(period)), Arc::new(PlayedLinks::default()));
        let cells =
            Cells::start(config.clone(), store.clone(), providers(&provider)).await.unwrap();
        cells.serve(Arc::clone(&links) as _);
        Self { cells, provider, links, store, config, _dir: dir }
    }

    /// Stops the daemon and starts another. Returns all events of the new daemon.
    pub(super) async fn restart(&mut self) -> tokio::sync::broadcast::Receiver<super::CellEvent> {
        self.cells.shutdown().await;
        self.cells =
            Cells::start(self.config.clone(), self.store.clone(), providers(&self.provider))
                .await
                .unwrap();
        let events = self.cells.events();
        self.cells.serve(Arc::clone(&self.links) as _);
        events
    }

    /// Begins a launch in its own task.
    pub(super) fn launch(&self) -> (SandboxId, Launching) {
        self.launch_for("uid")
    }

    fn launch_for(&self, pod_uid: &str) -> (SandboxId, Launching) {
        let sandbox = SandboxId::mint().unwrap();
        let (id, wanted) = (sandbox.clone(), wanted(pod_uid));
        let cells = Arc::clone(&self.cells);
        (sandbox, tokio::spawn(async move { cells.launch(wanted, id, None).await }))
    }

    /// Waits until the provider's calls are exactly these.
    pub(super) async fn called(&self, calls: &[&str]) {
        eventually(&format!("{calls:?} after {:?}", self.provider.calls()), || {
            self.provider.calls() == calls
        })
        .await;
    }

    /// Returns the only cell.
    pub(super) fn only(&self) -> CellId {
        let all = self.cells.all();
        assert_eq!(all.len(), 1, "{all:?}");
        all.into_iter().next().unwrap()
    }

    pub(super) fn token_sha256(&self, cell: &CellId) -> String {
        hex::encode(digest(&SHA256, locked(&self.links.tokens)[cell].as_bytes()))
    }

    /// Enrols the agent of a cell and connects it.
    pub(super) async fn comes_home(&self, cell: &CellId) {
        self.cells.redeem(cell.as_str(), &self.token_sha256(cell), "its key").await.unwrap();
        assert!(self.cells.admits(cell.as_str(), "its key").is_ok());
        self.cells
            .linked(cell, Some(HelloReply { cell: cell.to_string(), ..HelloReply::default() }));
    }

    /// Returns a cell that is bound to a pod.
    pub(super) async fn bound(&self) -> CellId {
        self.bound_to("uid").await
    }

    /// Returns a cell that is bound to the pod with this UID.
    pub(super) async fn bound_to(&self, pod_uid: &str) -> CellId {
        let before = self.cells.all();
        let known = locked(&self.links.tokens).len();
        let (sandbox, launch) = self.launch_for(pod_uid);
        eventually("a launch", || locked(&self.links.tokens).len() > known).await;
        let cell = self.cells.all().into_iter().find(|cell| !before.contains(cell)).unwrap();
        self.comes_home(&cell).await;
        let bound = launch.await.unwrap().unwrap();
        assert_eq!((&bound.cell.id, bound.sandbox), (&cell, sandbox.clone()));
        assert_eq!(bound.attached.addresses, [IpAddr::from([10, 0, 0, 7])]);
        let mut batch = Batch::default();
        batch.put(
            Table::Sandboxes,
            sandbox.as_str(),
            &store::SandboxMeta {
                id: sandbox.to_string(),
                cell: cell.to_string(),
                ..Default::default()
            },
        );
        self.store.commit(batch).await.unwrap();
        cell
    }

    pub(super) async fn stored(&self) -> Vec<store::Cell> {
        self.store.load(Table::Cells).await.unwrap().into_iter().map(|(_, cell)| cell).collect()
    }

    pub(super) async fn stored_orders(&self) -> Vec<(String, store::Order)> {
        self.store.load(Table::Orders).await.unwrap()
    }

    pub(super) async fn stored_phase(&self, phase: store::CellPhase) {
        let is_so = async || {
            (self.stored().await.first().map(store::Cell::phase) == Some(phase)).then_some(())
        };
        kiyot_testkit::wait_until(format!("the record says {phase:?}"), PATIENCE, is_so).await;
    }
}

/// Waits until a condition holds.
pub(super) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    kiyot_testkit::wait_until(what, PATIENCE, async || holds().then_some(())).await;
}

/// Returns the next event of a cell's end.
pub(super) async fn next_gone(
    events: &mut tokio::sync::broadcast::Receiver<super::CellEvent>,
) -> (CellId, String) {
    loop {
        if let super::CellEvent::Gone { cell, reason } =
            tokio::time::timeout(PATIENCE, events.recv()).await.unwrap().unwrap()
        {
            return (cell, reason);
        }
    }
}
