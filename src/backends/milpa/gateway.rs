//! The gateway: cells dial it over mutual TLS, and the daemon calls cells over these connections.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_engine::id::CellId;
use kiyot_link::{
    bootstrap::{AgentPin, Bootstrap, GatewayAddress},
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
    counted_stream::LinkBytes,
    downloads::Downloads,
    enrol::Enrolment,
    listener::Listener,
    refusal_log::RefusalLog,
    shared::Shared,
};
use crate::metrics::ByteCounter;

mod admission;
mod agent_program;
pub mod ca;
mod conn_limit;
mod connections;
mod control;
mod counted_stream;
mod downloads;
mod enrol;
mod handshake;
mod idle_policy;
mod limits;
mod listener;
mod message_rate;
mod peer;
mod program_form;
mod refusal_log;
mod shared;

pub use agent_program::{AgentProgram, AgentProgramError};
pub use control::{ControlChannel, ControlConnection, EventStream};
pub use limits::Limits;

/// The reason for refusing a cell.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The cell is unknown or has ended.
    #[error("cell {0:?} is unknown or has ended")]
    Unknown(String),
    /// The cell has ended, or is being ended: its agent dials until the instance has ended.
    #[error("cell {0} has ended or is being ended")]
    Ended(CellId),
    /// The token is not this cell's.
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
    Store(CellId, #[source] Arc<kiyot_engine::StoreError>),
}

/// Decides which cells may enrol and connect. Implemented by [`super::cells::Cells`].
#[async_trait]
pub trait Admission: Send + Sync + 'static {
    /// Spends a cell's token for a key, durably, before a certificate is issued. Idempotent for the
    /// same key until the token expires.
    async fn redeem(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal>;
    /// Returns the id of the cell with this token, without spending it. A spent token is valid
    /// until it expires.
    fn expects(&self, cell: &str, token_sha256: &str) -> Result<CellId, Refusal>;
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
    /// The channel for all calls. Its connection opens on demand, and closes when idle.
    pub bulk: Channel,
    /// The rate limit for log lines that the cell's agent can cause.
    pub lines: Arc<LogLimit>,
}

/// Configuration of a gateway.
#[derive(Debug)]
pub struct GatewayConfig {
    /// The unix socket, for cells on this node.
    pub socket: PathBuf,
    /// The TCP endpoint, for cells on other machines; `None` opens no port.
    pub tcp: Option<TcpEndpoint>,
    /// The agent's program, for cells on other machines; `None` serves no program.
    pub agent: Option<AgentProgram>,
    /// The authority that issues certificates for cells.
    pub ca: Ca,
    /// The daemon's build, sent to agents.
    pub build_id: String,
    /// The time without contact after which an agent stops its pod, sent to agents.
    pub orphan_timeout: Duration,
    /// The clock by which certificates of cells expire.
    pub clock: Clock,
    /// The limits of the gateway's connections.
    pub limits: Limits,
}

/// The TCP endpoint of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpEndpoint {
    /// The address to listen on. With port 0 the kernel chooses the port.
    pub listen: SocketAddr,
    /// The address that cells dial, if it differs from the bound one.
    pub advertise: Option<SocketAddr>,
    /// True if `advertise` is a forwarder's address: peer addresses are then not those of cells.
    pub is_forwarded: bool,
}

/// An error of starting the gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The unix socket could not be bound.
    #[error("socket {0:?}")]
    Socket(PathBuf, #[source] io::Error),
    /// The TCP address could not be bound.
    #[error("gateway.listen = \"{0}\": can't listen on this address")]
    Listen(SocketAddr, #[source] io::Error),
    /// The gateway's certificate could not be issued.
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
    tcp_address: Option<SocketAddr>,
    is_forwarded: bool,
    ca_sha256: String,
    /// The program's digest in the boot data of cells on other machines.
    agent: Option<AgentPin>,
    orphan_timeout: Duration,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("address", &self.0.address).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Listens. A cell retries until it has a link ([`Gateway::link`]) and [`Admission::admits`]
    /// accepts it.
    pub async fn start(
        config: GatewayConfig,
        admission: Arc<dyn Admission>,
    ) -> Result<Self, GatewayError> {
        let ca = Arc::new(config.ca);
        let identity = ca.gateway_identity().map_err(GatewayError::Certificate)?;
        let is_forwarded = config.tcp.is_some_and(|endpoint| endpoint.is_forwarded);
        // TCP first, because binding the socket replaces the socket of another daemon.
        let tcp = match config.tcp {
            Some(TcpEndpoint { listen, advertise, .. }) => {
                let (listener, bound) = match Listener::tcp(listen).await {
                    Ok((listener, bound)) => (Some(listener), bound),
                    // While no daemon runs, any user of the node can take the port.
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                        tracing::error!(
                            %error,
                            retry = ?listener::LISTEN_PAUSE,
                            "gateway.listen = \"{listen}\": port is in use, cells on other \
                             machines can't dial"
                        );
                        (None, listen)
                    }
                    Err(error) => return Err(GatewayError::Listen(listen, error)),
                };
                Some((listener, listen, advertise.unwrap_or(bound)))
            }
            None => None,
        };
        let tcp_address = tcp.as_ref().map(|(_, _, advertised)| *advertised);
        let address = GatewayAddress::Unix(config.socket.clone());
        let socket = Listener::unix(&config.socket)
            .map_err(|error| GatewayError::Socket(config.socket, error))?;
        let program = config.agent.filter(|_| tcp.is_some());
        let agent = program.as_ref().map(|program| AgentPin {
            sha256: program.sha256().to_owned(),
            size_bytes: program.size(),
            ca_pem: ca.certificate_pem(),
        });
        let downloads = match program {
            Some(program) => {
                let tls = tls::download_server(identity.clone()).map_err(GatewayError::Tls)?;
                Some(Downloads::new(program, tls))
            }
            None => None,
        };
        let (shutdown, tasks) = (CancellationToken::new(), TaskTracker::new());
        let clock = config.clock;
        let log = Arc::<RefusalLog>::default();
        let shared = Arc::new(Shared {
            connections: Connections::new(
                config.limits.bulk_idle.clone(),
                shutdown.clone(),
                tasks.clone(),
            ),
            enrolment: Enrolment {
                ca: ca.clone(),
                admission: admission.clone(),
                clock: clock.clone(),
                lifetime: config.limits.certificate,
                log: log.clone(),
            },
            log,
            downloads,
            enrol_tls: Arc::new(tls::enrol_server(identity.clone()).map_err(GatewayError::Tls)?),
            cell_tls: Arc::new(
                tls::cell_server(identity, ca.certificate_der(), clock)
                    .map_err(GatewayError::Tls)?,
            ),
            admission,
            limits: config.limits,
            bytes: LinkBytes::default(),
            build_id: config.build_id,
            sequence: AtomicU64::new(1),
            shutdown,
            tasks,
        });
        let Limits { unauthenticated, unauthenticated_per_peer, cooldown, .. } = shared.limits;
        let limit = || ConnLimit::new(unauthenticated, unauthenticated_per_peer, cooldown);
        shared.tasks.spawn(listener::run(socket, limit(), shared.clone()));
        if let Some((listener, listen, _)) = tcp {
            let (limit, shared) = (limit(), shared.clone());
            shared.tasks.clone().spawn(async move {
                let listener = match listener {
                    Some(listener) => Some(listener),
                    None => shared.shutdown.run_until_cancelled(listener::awaited(listen)).await,
                };
                if let Some(listener) = listener {
                    listener::run(listener, limit, shared).await;
                }
            });
        }
        tracing::info!(%address, tcp_address = ?tcp_address, "gateway listens");
        Ok(Self(Arc::new(Inner {
            shared,
            address,
            tcp_address,
            is_forwarded,
            ca_sha256: ca.sha256(),
            agent,
            orphan_timeout: config.orphan_timeout,
        })))
    }

    /// Returns the counters of the bytes received and sent on all connections.
    pub fn bytes(&self) -> (ByteCounter, ByteCounter) {
        let LinkBytes { received, sent } = self.0.shared.bytes.clone();
        (received, sent)
    }

    /// Returns the link to a cell. After the first call, the cell may connect.
    pub fn link(&self, cell: &CellId) -> CellLink {
        self.0.shared.connections.link(cell)
    }

    /// Removes a cell's link: aborts its connections, and fails its calls at once. Does not call
    /// [`Admission::linked`].
    pub fn forget(&self, cell: &CellId) {
        self.0.shared.connections.forget(cell);
    }

    /// Returns the address from which the cell's agent connected last; `None` over the unix socket
    /// and through a forwarder.
    pub fn peer_address(&self, cell: &CellId) -> Option<IpAddr> {
        if self.0.is_forwarded {
            return None;
        }
        self.0.shared.connections.get(cell)?.peer()
    }

    /// Returns the data with which a cell, perhaps on another machine, enrols.
    pub fn bootstrap(&self, cell: &CellId, token: &str, is_remote: bool) -> Bootstrap {
        // A configured provider of remote cells has a port.
        let tcp = self.0.tcp_address.filter(|_| is_remote).map(GatewayAddress::Tcp);
        Bootstrap {
            cell: cell.to_string(),
            gateway: tcp.unwrap_or_else(|| self.0.address.clone()),
            ca_sha256: self.0.ca_sha256.clone(),
            token: token.to_owned(),
            orphan_timeout_secs: self.0.orphan_timeout.as_secs(),
            agent: self.0.agent.clone().filter(|_| is_remote),
        }
    }

    /// Returns the address that cells on this node dial.
    pub fn address(&self) -> &GatewayAddress {
        &self.0.address
    }

    /// Returns the address that cells on other machines dial.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.0.tcp_address
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
