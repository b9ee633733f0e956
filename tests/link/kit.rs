//! Fixtures of the tests of the link.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use kiyot::backends::milpa::gateway::{
    AgentProgram, CellLink, Gateway, GatewayConfig, Limits, TcpEndpoint, ca::Ca,
};
use kiyot_cell::uplink::{Outcome, Uplink, UplinkHandle};
use kiyot_engine::id::CellId;
use kiyot_link::{
    bootstrap::{Bootstrap, GatewayAddress},
    clock::Clock,
};
use kiyot_proto::cell::agent_server::AgentServer;
use kiyot_testkit::{
    relay::{Rate, Relay},
    wait_for,
};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

mod admission;
mod agent;
mod manual_agent;

pub(crate) use admission::TestAdmission;
pub(crate) use agent::{TestAgent, timed};
pub(crate) use kiyot_testkit::LIMIT;
pub(crate) use manual_agent::{FakeAgent, ManualAgent, assert_refused, dial, dial_as};

/// The token of every cell.
pub(crate) const TOKEN: &str = "open-sesame";

/// Waits for a future.
///
/// # Panics
/// After [`LIMIT`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future)
        .await
        .unwrap_or_else(|_| panic!("{what}: not within {LIMIT:?}"))
}

/// Returns limits that a slow machine does not reach.
pub(crate) fn limits() -> Limits {
    Limits {
        handshake: LIMIT,
        enrolment: LIMIT,
        bulk_idle: LIMIT..=LIMIT,
        cooldown: Duration::ZERO,
        ..Limits::default()
    }
}

/// The addresses on which a gateway listens.
#[derive(Debug, Clone)]
pub(crate) struct Endpoints {
    pub(crate) socket: PathBuf,
    pub(crate) tcp: Option<TcpEndpoint>,
    /// The path of the agent's program that the gateway serves.
    pub(crate) agent: Option<PathBuf>,
}

impl Endpoints {
    /// Returns the endpoints for a cell on this node: a socket.
    pub(crate) fn unix(dir: &TempDir) -> Self {
        Self { socket: dir.path().join("gateway.sock"), tcp: None, agent: None }
    }

    /// Returns the endpoints for a cell on another machine: a socket and any free port.
    pub(crate) fn tcp(dir: &TempDir) -> Self {
        let tcp = TcpEndpoint {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            is_forwarded: false,
        };
        Self { tcp: Some(tcp), ..Self::unix(dir) }
    }
}

/// A gateway with a cell that may enrol.
pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) admission: Arc<TestAdmission>,
    pub(crate) gateway: Gateway,
    pub(crate) cell: CellId,
    pub(crate) link: CellLink,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        Self::with_limits(limits()).await
    }

    pub(crate) async fn with_limits(limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let endpoints = Endpoints::unix(&dir);
        Self::with_ca(dir, endpoints, limits, Ca::new().unwrap()).await
    }

    /// Starts a gateway whose cell is on another machine.
    pub(crate) async fn over_tcp(limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let endpoints = Endpoints::tcp(&dir);
        Self::with_ca(dir, endpoints, limits, Ca::new().unwrap()).await
    }

    pub(crate) async fn with_ca(
        dir: TempDir,
        endpoints: Endpoints,
        limits: Limits,
        ca: Ca,
    ) -> Self {
        Self::with_clock(Clock::default(), dir, endpoints, limits, ca).await
    }

    pub(crate) async fn with_clock(
        clock: Clock,
        dir: TempDir,
        endpoints: Endpoints,
        limits: Limits,
        ca: Ca,
    ) -> Self {
        let admission = Arc::new(TestAdmission::default());
        let gateway = start_gateway_with_clock(clock, &admission, endpoints, limits, ca).await;
        let cell = CellId::mint().unwrap();
        admission.expect(&cell, TOKEN);
        let link = gateway.link(&cell);
        Self { dir, admission, gateway, cell, link }
    }

    /// Starts an unlimited relay in front of the gateway.
    pub(crate) fn relay(&self) -> Relay {
        self.relay_with(Rate::UNLIMITED, Rate::UNLIMITED)
    }

    pub(crate) fn relay_with(&self, up: Rate, down: Rate) -> Relay {
        let gateway = self.gateway.address();
        let listen = match gateway {
            GatewayAddress::Unix(_) => GatewayAddress::Unix(self.dir.path().join("relay.sock")),
            GatewayAddress::Tcp(_) => GatewayAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 0))),
        };
        Relay::start(&listen, gateway, up, down)
    }

    pub(crate) fn bootstrap(&self) -> Bootstrap {
        self.bootstrap_of(&self.cell)
    }

    /// Returns the boot data of a cell that dials the same address as the fixture's cell.
    pub(crate) fn bootstrap_of(&self, cell: &CellId) -> Bootstrap {
        self.gateway.bootstrap(cell, TOKEN, self.gateway.tcp_address().is_some())
    }

    pub(crate) fn private_dir(&self) -> PathBuf {
        self.dir.path().join("private")
    }

    pub(crate) fn agent(&self) -> RunningAgent {
        self.agent_with(self.bootstrap())
    }

    pub(crate) fn agent_with(&self, bootstrap: Bootstrap) -> RunningAgent {
        RunningAgent::start(bootstrap, self.private_dir())
    }

    /// Waits for a control connection.
    pub(crate) async fn wait_linked(&self) {
        within("a control connection", self.link.control.connected()).await.unwrap();
    }

    /// Waits for the end of the control connection.
    pub(crate) async fn wait_unlinked(&self) {
        wait_for("the end of the control connection", || !self.link.control.is_connected()).await;
    }
}

pub(crate) async fn start_gateway(
    admission: &Arc<TestAdmission>,
    endpoints: Endpoints,
    limits: Limits,
    ca: Ca,
) -> Gateway {
    start_gateway_with_clock(Clock::default(), admission, endpoints, limits, ca).await
}

pub(crate) async fn start_gateway_with_clock(
    clock: Clock,
    admission: &Arc<TestAdmission>,
    endpoints: Endpoints,
    limits: Limits,
    ca: Ca,
) -> Gateway {
    let config = GatewayConfig {
        socket: endpoints.socket,
        tcp: endpoints.tcp,
        agent: endpoints.agent.map(|path| AgentProgram::open(&path).unwrap()),
        ca,
        build_id: "daemon".to_owned(),
        orphan_timeout: Duration::from_secs(900),
        clock,
        limits,
    };
    Gateway::start(config, admission.clone()).await.unwrap()
}

/// A real agent that runs until it is dropped.
pub(crate) struct RunningAgent {
    pub(crate) agent: TestAgent,
    pub(crate) handle: UplinkHandle,
    shutdown: CancellationToken,
    task: JoinHandle<Outcome>,
}

impl RunningAgent {
    pub(crate) fn start(bootstrap: Bootstrap, private_dir: PathBuf) -> Self {
        Self::start_with_clock(Clock::default(), bootstrap, private_dir)
    }

    pub(crate) fn start_with_clock(
        clock: Clock,
        bootstrap: Bootstrap,
        private_dir: PathBuf,
    ) -> Self {
        let cell = bootstrap.cell.clone();
        let home = Uplink::new(bootstrap, &private_dir, "agent").unwrap().by_clock(clock);
        let handle = home.handle();
        let agent = TestAgent::new(cell, handle.clone());
        let shutdown = CancellationToken::new();
        let (own, end) = (agent.clone(), shutdown.clone());
        let task = tokio::spawn(async move {
            home.run(move |info| AgentServer::new(own.for_connection(info)), end).await
        });
        Self { agent, handle, shutdown, task }
    }

    /// Shuts the agent down and waits for its end.
    pub(crate) async fn stop(mut self) -> Outcome {
        self.shutdown.cancel();
        within("the end of the agent", &mut self.task).await.unwrap()
    }

    /// Waits until the agent ends by itself.
    pub(crate) async fn outcome(mut self) -> Outcome {
        within("the end of the agent", &mut self.task).await.unwrap()
    }
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}
