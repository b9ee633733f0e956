//! Uplink of a cell: enrols, dials the gateway, serves calls on the dialled connections, and
//! reconnects.

use std::{
    error::Error,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::Duration,
};

use http::{Request, Response};
use kiyot_link::{bootstrap::Bootstrap, clock::Clock};
use kiyot_proto::cell::ConnectionKind;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;

use self::{
    backoff::Backoff,
    bulk::BulkTrigger,
    dial::{DialError, Dialler, Endpoint},
    identity::{Credentials, IdentityError},
    link_state::LinkMonitor,
};

mod backoff;
mod bulk;
mod connector;
mod control;
mod dial;
mod enrol;
mod identity;
mod link_state;

pub(crate) use identity::CERTIFICATE_FILE;
pub use link_state::LinkState;

/// Timeout of a connection attempt: dial, TLS handshake, and the gateway's first call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeout of an enrolment attempt.
const ENROL_TIMEOUT: Duration = Duration::from_secs(20);

/// Consecutive rejected connections after which the certificate is renewed.
const MAX_REJECTIONS: u32 = 5;

/// Time for running calls to finish when the uplink is closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Identifies a connection to the gateway, as the agent reports it in its reply to `Hello`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Purpose of the connection.
    pub kind: ConnectionKind,
    /// Number of the connection in this run of the agent.
    pub generation: u64,
    /// Random id of this run of the agent.
    pub incarnation: Arc<str>,
}

/// Service for the calls on a connection: a tonic service, mostly [`tonic::service::Routes`].
pub trait Serve:
    tower::Service<
        Request<Body>,
        Response = Response<Body>,
        Error: Into<Box<dyn Error + Send + Sync>>,
        Future: Send,
    > + Clone
    + Send
    + 'static
{
}

impl<S> Serve for S where
    S: tower::Service<
            Request<Body>,
            Response = Response<Body>,
            Error: Into<Box<dyn Error + Send + Sync>>,
            Future: Send,
        > + Clone
        + Send
        + 'static
{
}

/// Errors that keep the uplink from starting.
#[derive(Debug, thiserror::Error)]
pub enum UplinkError {
    /// The key can't be created, read or stored.
    #[error("key and certificate of the agent")]
    Identity(#[from] IdentityError),
    /// The kernel returned no random bytes.
    #[error("no random bytes from the kernel")]
    Randomness,
}

/// Reason for the end of [`Uplink::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The `shutdown` token was cancelled.
    Shutdown,
    /// There was no control connection for `orphan_timeout`: the pod must be stopped and the cell
    /// powered off. The time until a broken connection is noticed (at most 30 s) doesn't count, so
    /// an observer must wait 30 s longer.
    Orphaned,
}

/// The agent's side of the link to the gateway.
pub struct Uplink {
    endpoint: Endpoint,
    bootstrap: Bootstrap,
    build_id: String,
    credentials: Credentials,
    link_monitor: LinkMonitor,
    bulk_trigger: BulkTrigger,
    incarnation: Arc<str>,
    clock: Clock,
}

impl fmt::Debug for Uplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uplink")
            .field("cell", &self.bootstrap.cell)
            .field("incarnation", &self.incarnation)
            .finish_non_exhaustive()
    }
}

/// Cheap handle to an uplink, for the agent's service.
#[derive(Debug, Clone)]
pub struct UplinkHandle {
    bulk_trigger: BulkTrigger,
    state: watch::Receiver<LinkState>,
}

impl UplinkHandle {
    /// Requests a bulk connection, as `OpenBulk` does. Ignored while a connection is being made or
    /// is new. Returns at once.
    pub fn open_bulk(&self) {
        self.bulk_trigger.request();
    }

    /// Returns a receiver of the link's state.
    pub fn state(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }
}

impl Uplink {
    /// Creates an uplink. Key and certificate are stored in `private_dir` (created with mode 0700),
    /// so that a restarted agent needs no token.
    pub fn new(
        bootstrap: Bootstrap,
        private_dir: &Path,
        build_id: &str,
    ) -> Result<Self, UplinkError> {
        let credentials = Credentials::load_or_create(private_dir, &bootstrap.cell)?;
        let mut random = [0_u8; 16];
        SystemRandom::new().fill(&mut random).map_err(|_| UplinkError::Randomness)?;
        let orphan_timeout = Duration::from_secs(bootstrap.orphan_timeout_secs);
        Ok(Self {
            build_id: build_id.to_owned(),
            credentials,
            link_monitor: LinkMonitor::new(private_dir, orphan_timeout),
            bulk_trigger: BulkTrigger::default(),
            incarnation: hex::encode(random).into(),
            endpoint: Endpoint { address: bootstrap.gateway.clone(), namespace: None },
            bootstrap,
            clock: Clock::default(),
        })
    }

    /// Replaces the machine's clock.
    #[must_use]
    pub fn by_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Dials from this network namespace instead of the agent's own.
    #[must_use]
    pub fn from_namespace(mut self, namespace: PathBuf) -> Self {
        self.endpoint.namespace = Some(namespace);
        self
    }

    /// Returns a handle to the uplink.
    pub fn handle(&self) -> UplinkHandle {
        UplinkHandle { bulk_trigger: self.bulk_trigger.clone(), state: self.link_monitor.state() }
    }

    /// Keeps the cell connected until `shutdown` is cancelled or the cell is orphaned. `service`
    /// creates a service per connection. All connections are closed on return.
    pub async fn run<S: Serve>(
        self,
        service: impl Fn(ConnectionInfo) -> S + Send + Sync,
        shutdown: CancellationToken,
    ) -> Outcome {
        let tasks = TaskTracker::new();
        let end = shutdown.child_token();
        let outcome = tokio::select! {
            () = shutdown.cancelled() => Outcome::Shutdown,
            () = self.link_monitor.orphaned() => Outcome::Orphaned,
            never = self.stay_connected(&service, &end, &tasks) => match never {},
        };
        end.cancel();
        tasks.close();
        if tokio::time::timeout(DRAIN_TIMEOUT, tasks.wait()).await.is_err() {
            tracing::warn!("calls from the gateway still running after the uplink was closed");
        }
        outcome
    }

    async fn stay_connected<S: Serve>(
        &self,
        service: &(impl Fn(ConnectionInfo) -> S + Send + Sync),
        end: &CancellationToken,
        tasks: &TaskTracker,
    ) -> std::convert::Infallible {
        let generations = AtomicU64::new(1);
        let mut backoff = Backoff::default();
        let mut needs_certificate = !self.credentials.has_valid_certificate(self.clock.now());
        loop {
            if needs_certificate && let Err(error) = self.enrol(end, tasks).await {
                tracing::warn!(error = &error as &dyn Error, "enrolment failed, retrying");
            }
            needs_certificate = true;
            // A certificate that has expired by the cell's clock may still be valid by the
            // gateway's.
            let dialler = match self.dialler() {
                Ok(Some(dialler)) => dialler,
                Ok(None) => {
                    backoff.wait().await;
                    continue;
                }
                Err(error) => {
                    tracing::error!(error = &error as &dyn Error, "certificate unusable, retrying");
                    backoff.wait().await;
                    continue;
                }
            };
            let connector = connector::Connector {
                uplink: self,
                dialler: Mutex::new(Arc::new(dialler)),
                generations: &generations,
                service,
                end,
                tasks,
            };
            // `keep_control` returns when the control connection needs a new certificate.
            tokio::select! {
                () = self.keep_control(&connector, &mut backoff) => {}
                never = bulk::run(&self.bulk_trigger, &connector) => match never {},
            }
        }
    }

    /// Returns a dialler with the current certificate, or `None` without one.
    fn dialler(&self) -> Result<Option<Dialler>, DialError> {
        let identity = self.credentials.identity();
        identity
            .map(|identity| Dialler::new(&self.endpoint, &self.bootstrap, identity, &self.clock))
            .transpose()
    }

    /// Keeps a control connection until the certificate has expired or is rejected. The gateway
    /// decides by its own clock, which may differ from the cell's.
    async fn keep_control<S: Serve>(
        &self,
        connector: &connector::Connector<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
        backoff: &mut Backoff,
    ) {
        let mut rejections = 0;
        // If the certificate had expired before its first use, only the gateway can judge it.
        let was_expired = !self.credentials.has_valid_certificate(self.clock.now());
        while rejections < MAX_REJECTIONS
            && (was_expired || self.credentials.has_valid_certificate(self.clock.now()))
        {
            match connector.serve(ConnectionKind::Control, || self.link_monitor.linked()).await {
                Ok(connector::Served::Accepted) => {
                    tracing::info!("control connection lost, reconnecting");
                    self.link_monitor.unlinked();
                    backoff.reset();
                    rejections = 0;
                }
                Ok(connector::Served::Rejected) => {
                    rejections += 1;
                    tracing::warn!("control connection rejected by the gateway, retrying");
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn Error, "gateway unreachable, retrying")
                }
            }
            backoff.wait().await;
        }
        tracing::info!("renewing certificate");
    }

    /// Requests a certificate.
    async fn enrol(
        &self,
        end: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Result<(), enrol::EnrolError> {
        let enrolled = enrol::enrol(
            &self.endpoint,
            &self.bootstrap,
            &self.credentials,
            &self.build_id,
            &self.clock,
            end,
            tasks,
        );
        let certificate = tokio::time::timeout(ENROL_TIMEOUT, enrolled)
            .await
            .map_err(|_| DialError::Timeout(ENROL_TIMEOUT))??;
        if !self.credentials.store(&certificate)? {
            return Err(enrol::EnrolError::OtherCertificate);
        }
        if !self.credentials.has_valid_certificate(self.clock.now()) {
            tracing::warn!(
                "new certificate already expired by this clock, which differs from the gateway's"
            );
        }
        Ok(())
    }
}
