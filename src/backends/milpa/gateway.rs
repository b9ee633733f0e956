//! The gateway: cells dial it over mutual TLS, and the daemon's calls run over the connections that
//! the cells have dialled.

use std::{
    fmt, io,
    ops::RangeInclusive,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_link::{
    bootstrap::{Bootstrap, GatewayAddress},
    channel::Channel,
    clock::Clock,
    log_limit::LogLimit,
    tls,
};
use kiyot_proto::cell::HelloReply;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    ca::{Ca, CaError},
    conn_limit::ConnLimit,
    connections::Connections,
    enrol::Enrolment,
    listener::Listener,
    refusal_log::RefusalLog,
    shared::Shared,
};
use super::id::CellId;

mod admission;
pub mod ca;
mod conn_limit;
mod connections;
mod control;
mod enrol;
mod idle_policy;
mod listener;
mod peer;
mod refusal_log;
mod shared;

pub use control::{ControlChannel, ControlConnection, EventStream};

/// The reason why a cell is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such cell is expected.
    #[error("cell {0:?} is unknown or has ended")]
    Unknown(String),
    /// The cell has ended, or is being ended: its agent dials until its instance has ended.
    #[error("cell {0} has ended or is being ended")]
    Ended(CellId),
    /// The token is not the cell's.
    #[error("wrong token of cell {0}")]
    WrongToken(CellId),
    /// The token has expired.
    #[error("token of cell {0} has expired")]
    Expired(CellId),
    /// Another key has spent the token: an alarm. An unbound cell is destroyed.
    #[error("token of cell {0} was spent by another key")]
    OtherKey(CellId),
    /// The store failed to record the spent token.
    #[error("token of cell {0} could not be recorded as spent")]
    Store(CellId, #[source] Arc<super::store::StoreError>),
}

/// Decides which cells may enrol and connect. Implemented by [`super::cells::Cells`].
#[async_trait]
pub trait Admission: Send + Sync + 'static {
    /// Spends a cell's token for a key, durably, before a certificate is issued. Idempotent for the
    /// same key until the token expires.
    async fn claim(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal>;
    /// Returns the id of a cell that may connect now with a certificate for this key.
    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal>;
    /// Records that a cell's control connection was established, or has ended (`None`). Called in
    /// order for each cell.
    fn linked(&self, cell: &CellId, hello: Option<HelloReply>);
}

/// The link to a cell. Cheap to clone; outlives connections.
#[derive(Debug, Clone)]
pub struct CellLink {
    /// The control connection: events, and the agent's Hello.
    pub control: ControlChannel,
    /// The channel for all calls. Its connection is opened on demand, and closed when it is idle.
    pub bulk: Channel,
    /// The rate limit for log lines that the cell's agent can cause.
    pub lines: Arc<LogLimit>,
}

/// Configuration of a gateway.
#[derive(Debug)]
pub struct GatewayConfig {
    /// The address to listen on. Port 0: the kernel chooses.
    pub listen: GatewayAddress,
    /// The address that cells dial, if it differs from the bound one.
    pub advertise: Option<GatewayAddress>,
    /// The authority that issues certificates for cells.
    pub ca: Ca,
    /// The daemon's build, sent to agents.
    pub build_id: String,
    /// The time without contact after which an agent stops its pod, sent to agents.
    pub orphan_timeout: Duration,
    /// The clock by which certificates of cells expire.
    pub clock: Clock,
    /// The limits of its connections.
    pub limits: Limits,
}

/// The limits of a gateway. Admitted connections are limited by the cells that have a link: two per
/// cell.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The most connections that are not admitted yet, or enrol.
    pub unauthenticated: usize,
    /// The most such connections per peer: an IP address; on a unix socket, a network namespace
    /// other than the daemon's (a cell's), or a process in the daemon's.
    pub unauthenticated_per_peer: usize,
    /// The timeout of the TLS handshake, and of the agent's reply to Hello.
    pub handshake: Duration,
    /// The timeout of a connection for enrolment.
    pub enrolment: Duration,
    /// The idle timeout of a bulk connection: at first, and at most for periodic calls.
    pub bulk_idle: RangeInclusive<Duration>,
    /// The lifetime of a cell's certificate.
    pub certificate: Duration,
    /// The bytes that a pod may use of its cell's disk, sent to agents; 0: no limit.
    pub ephemeral_storage: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            unauthenticated: 512,
            unauthenticated_per_peer: 16,
            handshake: Duration::from_secs(5),
            enrolment: Duration::from_secs(30),
            // Longer than the time for which an agent ignores requests for a connection that it has
            // just dialled (`FRESH` of kiyot-cell).
            bulk_idle: Duration::from_secs(6)..=Duration::from_secs(60),
            certificate: ca::CELL_CERTIFICATE_LIFETIME,
            ephemeral_storage: 0,
        }
    }
}

/// An error of starting the gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The address could not be bound.
    #[error("gateway address {0}")]
    Listen(GatewayAddress, #[source] io::Error),
    /// Its certificate could not be issued.
    #[error("certificate of the gateway")]
    Certificate(#[source] CaError),
    /// TLS could not be configured.
    #[error("TLS configuration of the gateway")]
    Tls(#[source] rustls::Error),
}

/// The gateway. Cheap to clone; ends with [`Gateway::shutdown`].
#[derive(Clone)]
pub struct Gateway(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    address: GatewayAddress,
    advertised: GatewayAddress,
    ca_sha256: String,
    orphan_timeout: Duration,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("address", &self.0.address).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Listens. A cell is admitted once it has a link ([`Gateway::link`]) and [`Admission::admits`]
    /// it; until then it retries.
    pub async fn start(
        config: GatewayConfig,
        admission: Arc<dyn Admission>,
    ) -> Result<Self, GatewayError> {
        let ca = Arc::new(config.ca);
        let identity = ca.gateway_identity().map_err(GatewayError::Certificate)?;
        let listener = Listener::bind(&config.listen)
            .await
            .map_err(|error| GatewayError::Listen(config.listen.clone(), error))?;
        let address = listener
            .address()
            .map_err(|error| GatewayError::Listen(config.listen.clone(), error))?;
        let (shutdown, tasks) = (CancellationToken::new(), TaskTracker::new());
        let clock = config.clock;
        let log = Arc::<RefusalLog>::default();
        let shared = Arc::new(Shared {
            connections: Connections::new(
                config.limits.bulk_idle.clone(),
                shutdown.clone(),
                tasks.clone(),
            ),
            conn_limit: ConnLimit::new(
                config.limits.unauthenticated,
                config.limits.unauthenticated_per_peer,
            ),
            enrolment: Enrolment {
                ca: ca.clone(),
                admission: admission.clone(),
                clock: clock.clone(),
                lifetime: config.limits.certificate,
                log: log.clone(),
            },
            log,
            enrol_tls: Arc::new(tls::enrol_server(identity.clone()).map_err(GatewayError::Tls)?),
            cell_tls: Arc::new(
                tls::cell_server(identity, ca.certificate_der(), clock)
                    .map_err(GatewayError::Tls)?,
            ),
            admission,
            limits: config.limits,
            build_id: config.build_id,
            sequence: AtomicU64::new(1),
            shutdown,
            tasks,
        });
        tracing::info!(%address, "gateway listens");
        shared.tasks.spawn(listener::run(listener, shared.clone()));
        let advertised = config.advertise.unwrap_or_else(|| address.clone());
        Ok(Self(Arc::new(Inner {
            shared,
            address,
            advertised,
            ca_sha256: ca.sha256(),
            orphan_timeout: config.orphan_timeout,
        })))
    }

    /// Returns the link to a cell. The cell may connect from the first call on.
    pub fn link(&self, cell: &CellId) -> CellLink {
        self.0.shared.connections.link(cell)
    }

    /// Removes a cell's link: aborts its connections and fails calls to it at once. Does not call
    /// [`Admission::linked`].
    pub fn forget(&self, cell: &CellId) {
        self.0.shared.connections.forget(cell);
    }

    /// Returns the data that a cell needs to enrol.
    pub fn bootstrap(&self, cell: &CellId, token: &str) -> Bootstrap {
        Bootstrap {
            cell: cell.to_string(),
            gateway: self.0.advertised.clone(),
            ca_sha256: self.0.ca_sha256.clone(),
            token: token.to_owned(),
            orphan_timeout_secs: self.0.orphan_timeout.as_secs(),
        }
    }

    /// Returns the bound address.
    pub fn address(&self) -> &GatewayAddress {
        &self.0.address
    }

    /// Aborts all connections, fails all calls, and waits for all tasks. Cells keep running, and
    /// dial the next gateway.
    pub async fn shutdown(&self) {
        // First, so that the end of the daemon is not recorded as the end of the links.
        self.0.shared.connections.forget_all();
        self.0.shared.shutdown.cancel();
        self.0.shared.tasks.close();
        self.0.shared.tasks.wait().await;
    }
}
