//! The gateway: cells dial home over mutual TLS, and calls to them run back over the connection
//! that they made.

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
    enrol::Enrolment,
    listener::Listener,
    newcomers::Newcomers,
    refusal_log::RefusalLog,
    shared::Shared,
    slots::Slots,
};
use super::id::CellId;

mod admit;
pub mod ca;
mod control;
mod enrol;
mod listener;
mod newcomers;
mod patience;
mod peer;
mod refusal_log;
mod shared;
mod slots;

pub use control::{Control, Events, Line};

/// Why a cell is not let in.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such cell is to be.
    #[error("cell {0:?} is not known, or has ended")]
    Unknown(String),
    /// Not the token that the cell was given.
    #[error("the token of cell {0} is another")]
    WrongToken(CellId),
    /// The token's time is over.
    #[error("the token of cell {0} has expired")]
    Expired(CellId),
    /// Another key has spent the token: an alarm, and the cell is destroyed if it is unbound.
    #[error("the token of cell {0} was spent by another key")]
    OtherKey(CellId),
    /// The store could not keep what must be kept first.
    #[error("what cell {0} did could not be recorded")]
    Store(CellId, #[source] super::store::StoreError),
}

/// What the gateway asks about cells. Implemented by [`super::cells::Cells`].
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Spends a cell's token for a key, durably, before a certificate is made. Again with the same
    /// key it is fine until the token's end.
    async fn claim(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal>;
    /// Whether a cell with a certificate for this key may connect now.
    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal>;
    /// A cell's control connection is there, or is gone. Called in order for each cell.
    fn linked(&self, cell: &CellId, hello: Option<HelloReply>);
}

/// The link to one cell. Cheap to clone; outlives connections.
#[derive(Debug, Clone)]
pub struct CellLink {
    /// Events, and what the agent says of itself.
    pub control: Control,
    /// All calls: the connection is asked for when a call needs it, and closed when nothing has
    /// used it for a while.
    pub bulk: Channel,
    /// Limits the lines of the log that its agent can cause.
    pub lines: Arc<LogLimit>,
}

/// How a gateway is to be.
#[derive(Debug)]
pub struct GatewayConfig {
    /// Where it listens. Port 0: the kernel chooses.
    pub listen: GatewayAddress,
    /// Where cells are told to call, when that is not where it listens.
    pub advertise: Option<GatewayAddress>,
    /// Whose certificates it knows.
    pub ca: Ca,
    /// Told to agents: the daemon's build.
    pub build_id: String,
    /// Told to agents: how long they go on without contact.
    pub orphan_timeout: Duration,
    /// By which cells' certificates end.
    pub clock: Clock,
    /// Its bounds.
    pub limits: Limits,
}

/// The bounds of a gateway. Connections that are let in are bounded by the cells that have a link:
/// two each.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections that are not let in yet, or enrol.
    pub newcomers: usize,
    /// The same of one peer: an address, or, on a unix socket, a network namespace other than the
    /// daemon's (a cell's), or a process in the daemon's own.
    pub newcomers_of_a_peer: usize,
    /// How long the TLS handshake may take, and how long the agent may take to answer the first
    /// call.
    pub handshake: Duration,
    /// How long a connection for enrolment lives at most.
    pub enrolment: Duration,
    /// How long a bulk connection without a call is kept: at first, and at most, where calls come
    /// again and again.
    pub bulk_idle: RangeInclusive<Duration>,
    /// How long a cell's certificate lives.
    pub certificate: Duration,
    /// Told to agents: bytes that a pod may take of its cell's disk; 0: no limit.
    pub ephemeral_storage: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            newcomers: 512,
            newcomers_of_a_peer: 16,
            handshake: Duration::from_secs(5),
            enrolment: Duration::from_secs(30),
            // Longer than an agent takes a wish for one that is there already (`FRESH` of
            // kiyot-cell).
            bulk_idle: Duration::from_secs(6)..=Duration::from_secs(60),
            certificate: ca::CELL_LIFETIME,
            ephemeral_storage: 0,
        }
    }
}

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The address could not be bound.
    #[error("the gateway's address {0}")]
    Listen(GatewayAddress, #[source] io::Error),
    /// Its own certificate could not be made.
    #[error("the gateway's certificate")]
    Certificate(#[source] CaError),
    /// TLS could not be set up.
    #[error("the gateway's TLS")]
    Tls(#[source] rustls::Error),
}

/// The gateway. Cheap to clone; it ends with [`Gateway::shutdown`].
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
    /// Listens. A cell is let in once it has a link ([`Gateway::link`]) and the ledger admits it;
    /// until then it comes again.
    pub async fn start(
        config: GatewayConfig,
        ledger: Arc<dyn Ledger>,
    ) -> Result<Self, GatewayError> {
        let ca = Arc::new(config.ca);
        let identity = ca.gateway_identity().map_err(GatewayError::Certificate)?;
        let listener = Listener::bind(&config.listen)
            .await
            .map_err(|error| GatewayError::Listen(config.listen.clone(), error))?;
        let address = listener
            .address()
            .map_err(|error| GatewayError::Listen(config.listen.clone(), error))?;
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        let clock = config.clock;
        let log = Arc::<RefusalLog>::default();
        let shared = Arc::new(Shared {
            slots: Slots::new(config.limits.bulk_idle.clone(), end.clone(), tasks.clone()),
            newcomers: Newcomers::new(config.limits.newcomers, config.limits.newcomers_of_a_peer),
            enrolment: Enrolment {
                ca: ca.clone(),
                ledger: ledger.clone(),
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
            ledger,
            limits: config.limits,
            build_id: config.build_id,
            arrivals: AtomicU64::new(1),
            end,
            tasks,
        });
        tracing::info!(%address, "The gateway listens.");
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

    /// The link to a cell. The first call for a cell makes its places, and from then on it may
    /// connect.
    pub fn link(&self, cell: &CellId) -> CellLink {
        self.0.shared.slots.link(cell)
    }

    /// Cuts a cell's connections and fails calls to it at once. Does not call [`Ledger::linked`].
    pub fn forget(&self, cell: &CellId) {
        self.0.shared.slots.forget(cell);
    }

    /// What a cell must be told before it can call.
    pub fn bootstrap(&self, cell: &CellId, token: &str) -> Bootstrap {
        Bootstrap {
            cell: cell.to_string(),
            gateway: self.0.advertised.clone(),
            ca_sha256: self.0.ca_sha256.clone(),
            token: token.to_owned(),
            orphan_timeout_secs: self.0.orphan_timeout.as_secs(),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> &GatewayAddress {
        &self.0.address
    }

    /// Ends it: all connections are cut, calls fail, and when this returns none of its tasks runs.
    /// The cells run on, and call the next gateway.
    pub async fn shutdown(&self) {
        // First, so that the ledger doesn't take the end of the daemon for the end of a link.
        self.0.shared.slots.forget_all();
        self.0.shared.end.cancel();
        self.0.shared.tasks.close();
        self.0.shared.tasks.wait().await;
    }
}
