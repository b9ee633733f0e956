//! The daemon's cells over a subject, with a kubelet that retries. The agents are the subject's
//! own, or played agents that enrol as soon as their instance runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use kiyot::backends::milpa::{
    cells::{BoundCell, Cells, CellsConfig, Configured, Links},
    gateway::{Admission, CellLink, Gateway, Refusal, ca::Ca},
    store::{Batch, Store, Table},
};
use kiyot_engine::{
    OrderKey, Wanted,
    engine::{CellError, ProviderKey},
    id::{CellId, SandboxId},
    provider::{ErrorClass, InstanceId, Provider},
};
use kiyot_link::bootstrap::Bootstrap;
use kiyot_local::boot_id;
use kiyot_proto::{
    cell::{HelloReply, MissingBlobsRequest, agent_client::AgentClient},
    store::{self, CellPhase, SandboxMeta},
};
use kiyot_testkit::{poll_until, wait_until};
use ring::digest::{SHA256, digest};
use tokio::task::JoinHandle;
use tonic::Request;

use super::{
    super::bench::{self, LIMIT, gateway_config, unconnected_link, wait_for},
    Subject,
    recorder::{Calls, Recorder},
};

/// The pause between the calls of agents, kubelet and listings.
const PAUSE: Duration = Duration::from_millis(2);

/// The digest of a blob that no cell has.
const ABSENT_BLOB: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
/// The deadline of a call to an agent.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A gateway that keeps the enrolment tokens, and whose agents end their pods when asked.
struct PlayedGateway<S> {
    subject: Arc<S>,
    tokens: Mutex<BTreeMap<CellId, String>>,
}

impl<S> fmt::Debug for PlayedGateway<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlayedGateway").finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: Subject> Links for PlayedGateway<S> {
    fn link(&self, _cell: &CellId) -> CellLink {
        unconnected_link()
    }

    fn bootstrap(&self, cell: &CellId, token: &str, _: bool) -> Bootstrap {
        self.tokens.lock().unwrap().insert(cell.clone(), token.to_owned());
        bench::bootstrap(cell, token)
    }

    fn peer_address(&self, _cell: &CellId) -> Option<IpAddr> {
        None
    }

    fn forget(&self, _cell: &CellId) {}

    async fn shut_down(&self, _cell: &CellId) -> bool {
        if let Some(gate) = self.subject.shutdowns() {
            gate.pass().await;
        }
        true
    }
}

/// The agents of a world's cells.
enum Agents {
    Played(JoinHandle<()>),
    /// The agents of the instances, with the gateway to which they connect.
    OfInstances(Gateway),
}

impl Agents {
    /// Returns the link to an agent that is not played.
    fn link(&self, cell: &CellId) -> Option<CellLink> {
        match self {
            Self::Played(_) => None,
            Self::OfInstances(gateway) => Some(gateway.link(cell)),
        }
    }
}

/// The daemon's cells over a subject.
pub(super) struct World<S> {
    subject: Arc<S>,
    pub(super) cells: Arc<Cells>,
    /// The calls to the provider, also of earlier daemons.
    pub(super) calls: Calls,
    played: Arc<PlayedGateway<S>>,
    agents: Agents,
    store: Store,
    /// The suffix of its pods' uids.
    name: String,
    /// The cell of a pod at the second provider, which lives until the end.
    beside: Option<CellId>,
    _dir: tempfile::TempDir,
}

impl<S: Subject> World<S> {
    pub(super) async fn start(subject: &Arc<S>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).await.unwrap();
        let calls = Calls::default();
        let played =
            Arc::new(PlayedGateway { subject: Arc::clone(subject), tokens: Mutex::default() });
        let (cells, agents) = serve(&store, &calls, &played).await;
        let name = SandboxId::mint().unwrap().to_string();
        let subject = Arc::clone(subject);
        let (beside, _dir) = (None, dir);
        let mut world = Self { subject, cells, calls, played, agents, store, name, beside, _dir };
        if world.subject.second().is_some() {
            let key = world.subject.capabilities().provider;
            world.beside = Some(world.run_without(Some(key), "beside").await);
        }
        world
    }

    /// Returns the cells of the subject.
    pub(super) fn all(&self) -> Vec<CellId> {
        let mut all = self.cells.all();
        all.retain(|cell| self.beside.as_ref() != Some(cell));
        all
    }

    /// Returns the key of the second provider, which has no cell for the pods of a case.
    fn second(&self) -> Option<ProviderKey> {
        self.subject.second().map(|second| second.capabilities().provider)
    }

    /// Ends the daemon, with all its calls, and starts another.
    pub(super) async fn restart(&mut self) {
        match &self.agents {
            Agents::Played(agents) => agents.abort(),
            Agents::OfInstances(gateway) => gateway.shutdown().await,
        }
        self.cells.shutdown().await;
        (self.cells, self.agents) = serve(&self.store, &self.calls, &self.played).await;
    }

    /// Launches a cell for a pod, in a task of its own.
    pub(super) fn launch(
        &self,
        pod: &str,
        timeout: Duration,
    ) -> JoinHandle<Result<BoundCell, CellError>> {
        self.launch_without(self.second(), pod, timeout)
    }

    /// Launches a cell for a pod, which a provider refuses.
    fn launch_without(
        &self,
        provider: Option<ProviderKey>,
        pod: &str,
        timeout: Duration,
    ) -> JoinHandle<Result<BoundCell, CellError>> {
        let (cells, sandbox) = (Arc::clone(&self.cells), SandboxId::mint().unwrap());
        let key = OrderKey {
            pod_uid: format!("{pod}-{}", self.name),
            namespace: "a-namespace".into(),
            name: pod.to_owned(),
            attempt: 0,
        };
        let refused_by = provider.map(|key| (key, "the pod is of the other".into()));
        let refused_by = refused_by.into_iter().collect();
        let wanted = Arc::new(Wanted { key, refused_by, ..Wanted::default() });
        tokio::spawn(async move { cells.launch(wanted, sandbox, Some(timeout)).await })
    }

    /// Runs a pod: repeats the launch until it succeeds, and records the sandbox.
    pub(super) async fn run(&self, pod: &str) -> CellId {
        self.run_without(self.second(), pod).await
    }

    async fn run_without(&self, provider: Option<ProviderKey>, pod: &str) -> CellId {
        let bound = poll_until(format!("{pod} runs"), LIMIT, PAUSE, async || {
            self.launch_without(provider, pod, LIMIT).await.unwrap().ok()
        })
        .await;
        let (sandbox, cell) = (bound.sandbox.to_string(), bound.cell.id);
        let meta =
            SandboxMeta { id: sandbox.clone(), cell: cell.to_string(), ..SandboxMeta::default() };
        let mut batch = Batch::default();
        batch.put(Table::Sandboxes, &sandbox, &meta);
        self.store.commit(batch).await.unwrap();
        cell
    }

    /// Waits until a launch has begun and its reply is held. Agents of instances connect meanwhile.
    pub(super) async fn launch_is_held(&self) {
        wait_for("the launch has begun", async || self.subject.holds_launch()).await;
        for link in self.all().iter().filter_map(|cell| self.agents.link(cell)) {
            wait_for("the agent has connected", async || link.control.is_connected()).await;
        }
    }

    /// Waits for further listings, and makes them happen at once.
    pub(super) async fn listings(&self, further: usize) {
        let (any, enough) = (CellId::mint().unwrap(), self.calls.of("list").len() + further);
        poll_until("instances are listed", LIMIT, PAUSE, async || {
            // The loss of a link causes a listing.
            self.cells.linked(&any, None);
            (self.calls.of("list").len() >= enough).then_some(())
        })
        .await;
    }

    /// Waits until calls have failed with a class.
    pub(super) async fn failures(&self, name: &str, class: ErrorClass, count: usize) {
        wait_until(format!("{name} fails with {class:?}"), LIMIT, async || {
            (self.calls.failed(name, class) >= count).then_some(())
        })
        .await;
    }

    /// Returns the recorded state of a cell.
    pub(super) async fn phase(&self, cell: &CellId) -> Option<CellPhase> {
        let cells = self.store.load::<store::Cell>(Table::Cells).await.unwrap();
        cells.iter().find(|(id, _)| id == cell.as_str()).map(|(_, record)| record.phase())
    }

    /// Returns the instances of a cell that run.
    pub(super) fn instances(&self, cell: &CellId) -> Vec<InstanceId> {
        let running = self.subject.running().into_iter();
        running.filter(|(_, of)| of == cell).map(|(instance, _)| instance).collect()
    }

    /// Asserts that a cell is bound, and that its instance runs and was never terminated. An agent
    /// that is not played must answer, with its containerd.
    pub(super) async fn assert_lives(&self, cell: &CellId) {
        if let Some(link) = self.agents.link(cell) {
            let missing = wait_until(format!("the agent of {cell} answers"), LIMIT, async || {
                let digests = vec![ABSENT_BLOB.to_owned()];
                let mut request = Request::new(MissingBlobsRequest { digests });
                request.set_timeout(CALL_TIMEOUT);
                AgentClient::new(link.bulk.clone()).missing_blobs(request).await.ok()
            })
            .await;
            assert_eq!(missing.into_inner().digests, [ABSENT_BLOB]);
        }
        let instances = self.instances(cell);
        assert_eq!(instances.len(), 1, "{cell}");
        assert!(self.cells.get(cell).is_some(), "{cell} has ended");
        // An agent that is not played has a key of its own.
        let admitted = self.cells.admits(cell.as_str(), "key");
        assert!(matches!(admitted, Ok(_) | Err(Refusal::OtherKey(_))), "{cell} ends");
        let ended = self.calls.of("terminate");
        assert!(ended.iter().all(|call| call.instance.as_ref() != instances.first()), "{ended:?}");
    }

    /// Waits until a cell has ended with its instance.
    pub(super) async fn ends(&self, cell: &CellId) {
        wait_until(format!("{cell} has ended"), LIMIT, async || {
            let is_left = self.cells.all().contains(cell) || !self.instances(cell).is_empty();
            (!is_left).then_some(())
        })
        .await;
    }

    /// Asserts that the pod at the second provider was unharmed.
    async fn assert_beside_lives(&self) {
        let (Some(second), Some(beside)) = (self.subject.second(), &self.beside) else { return };
        let running: Vec<CellId> = second.running().into_iter().map(|(_, cell)| cell).collect();
        assert_eq!(running, std::slice::from_ref(beside));
        assert_eq!(self.phase(beside).await, Some(CellPhase::Bound));
    }

    /// Stops the pods of all cells, and asserts that nothing is left.
    pub(super) async fn stop_all(&self) {
        self.assert_beside_lives().await;
        for cell in self.cells.all() {
            let _retried = self.cells.terminate(&cell, "stopped").await;
        }
        wait_until("no instance is left", LIMIT, async || {
            let second = self.subject.second();
            let is_left = !self.cells.all().is_empty()
                || !self.subject.running().is_empty()
                || second.is_some_and(|second| !second.running().is_empty());
            (!is_left).then_some(())
        })
        .await;
        let launched: Vec<InstanceId> = self.calls.launched().into_iter().collect();
        self.subject.assert_nothing_left(&launched);
        if let Agents::OfInstances(gateway) = &self.agents {
            gateway.shutdown().await;
        }
        self.cells.shutdown().await;
    }
}

impl<S> Drop for World<S> {
    fn drop(&mut self) {
        if let Agents::Played(agents) = &self.agents {
            agents.abort();
        }
    }
}

/// Starts the daemon's cells with a gateway, and played agents unless the instances have agents.
async fn serve<S: Subject>(
    store: &Store,
    calls: &Calls,
    played: &Arc<PlayedGateway<S>>,
) -> (Arc<Cells>, Agents) {
    let subject = &played.subject;
    let recorder = Recorder::new(subject.provider(), subject.capabilities(), calls.clone());
    let config = CellsConfig {
        owner: subject.owner(),
        boot_id: boot_id(),
        launch_timeout: LIMIT,
        refusal_pause: Duration::from_millis(10),
        retry_pause: Duration::from_millis(10),
        ..CellsConfig::default()
    };
    let first = Configured::new(Arc::new(recorder));
    let second = subject.second().map(|second| Configured::new(Arc::clone(second) as _));
    let providers = [first].into_iter().chain(second).collect();
    let cells = Cells::start(config, store.clone(), providers).await.unwrap();
    let agents = if let Some(socket) = subject.gateway_socket() {
        let config = gateway_config(socket, Ca::load_or_make(store).await.unwrap());
        let gateway = Gateway::start(config, Arc::clone(&cells) as _).await.unwrap();
        cells.serve(Arc::new(gateway.clone()));
        Agents::OfInstances(gateway)
    } else {
        cells.serve(Arc::clone(played) as _);
        Agents::Played(tokio::spawn(run_agents(Arc::clone(&cells), Arc::clone(played))))
    };
    (cells, agents)
}

/// Enrols and connects the agent of each cell whose instance runs.
async fn run_agents<S: Subject>(cells: Arc<Cells>, gateway: Arc<PlayedGateway<S>>) {
    let mut connected = BTreeSet::new();
    loop {
        let of_second = gateway.subject.second().map(|second| second.running());
        for (_, cell) in gateway.subject.running().into_iter().chain(of_second.unwrap_or_default())
        {
            let token = gateway.tokens.lock().unwrap().get(&cell).cloned();
            let Some(token) = token.filter(|_| !connected.contains(&cell)) else { continue };
            let token = hex::encode(digest(&SHA256, token.as_bytes()));
            if cells.redeem(cell.as_str(), &token, "key").await.is_ok() {
                let hello = HelloReply { cell: cell.to_string(), ..HelloReply::default() };
                cells.linked(&cell, Some(hello));
                connected.insert(cell);
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
