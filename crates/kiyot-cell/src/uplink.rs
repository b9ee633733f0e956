//! Uplink: the agent's side of the link. It enrols, dials the gateway, serves calls on the
//! connections that it linked, and dials again when they end.

use std::{
    error::Error,
    fmt,
    path::Path,
    sync::{Arc, atomic::AtomicU64},
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
    dial::{DialError, Dialler},
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

pub use link_state::LinkState;

/// How long one attempt to connect may take: dial, TLS, and the gateway's first call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How long one attempt to enrol may take.
const ENROL_TIMEOUT: Duration = Duration::from_secs(20);

/// After this many rejections in a row a certificate is taken for one that is of no use.
const MAX_REJECTIONS: u32 = 5;

/// How long what still runs at the end may take to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// One connection to the gateway, as the agent's answer to `Hello` tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// What it is for.
    pub kind: ConnectionKind,
    /// Its number among the connections of this run of the agent.
    pub generation: u64,
    /// This run of the agent.
    pub incarnation: Arc<str>,
}

/// What serves calls on a connection: a service of tonic, mostly [`tonic::service::Routes`].
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

/// Why the agent can't begin to call home.
#[derive(Debug, thiserror::Error)]
pub enum UplinkError {
    /// Its key could not be linked, read or kept.
    #[error("the agent's key and certificate")]
    Identity(#[from] IdentityError),
    /// No random bytes from the kernel.
    #[error("no random bytes from the kernel")]
    Randomness,
}

/// Why [`Uplink::run`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was told to.
    Shutdown,
    /// The gateway has not been heard for `orphan_timeout`: the pod must be stopped and the cell
    /// powered off. The silence before a broken connection is noticed (30 s at most) does not
    /// count, so whoever waits for this end must wait that much longer.
    Orphaned,
}

/// The agent's side of the link.
pub struct Uplink {
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

/// What the agent's service needs of its home. Cheap to clone.
#[derive(Debug, Clone)]
pub struct UplinkHandle {
    bulk_trigger: BulkTrigger,
    state: watch::Receiver<LinkState>,
}

impl UplinkHandle {
    /// Has a bulk connection dialled, unless that is being done or has just been done: what
    /// `OpenBulk` means. Returns at once.
    pub fn open_bulk(&self) {
        self.bulk_trigger.request();
    }

    /// Whether there is link_monitor, and since when.
    pub fn state(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }
}

impl Uplink {
    /// Prepares it. Key and certificate are kept in `private_dir` (linked with mode 0700), so that an
    /// agent that is started again needs no token.
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
            bootstrap,
            clock: Clock::default(),
        })
    }

    /// The same, by another clock than the machine's.
    #[must_use]
    pub fn by_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// What the agent's service needs of it.
    pub fn handle(&self) -> UplinkHandle {
        UplinkHandle { bulk_trigger: self.bulk_trigger.clone(), state: self.link_monitor.state() }
    }

    /// Calls home until `shutdown` is cancelled or the cell is an orphan. `service` is asked for a
    /// service for each connection. When this returns, all connections are cut.
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
            never = self.call(&service, &end, &tasks) => match never {},
        };
        end.cancel();
        tasks.close();
        if tokio::time::timeout(DRAIN_TIMEOUT, tasks.wait()).await.is_err() {
            tracing::warn!("Calls from the gateway still run at the end of the link.");
        }
        outcome
    }

    async fn call<S: Serve>(
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
                tracing::warn!(
                    error = &error as &dyn Error,
                    "The cell could not enrol; it tries again."
                );
            }
            needs_certificate = true;
            // One that has ended by this clock, and could not be renewed, may still do by the
            // gateway's.
            let Some(identity) = self.credentials.identity() else {
                backoff.wait().await;
                continue;
            };
            let dialler = match Dialler::new(&self.bootstrap, identity, &self.clock) {
                Ok(dialler) => dialler,
                Err(error) => {
                    tracing::error!(
                        error = &error as &dyn Error,
                        "The cell's certificate can't be used; it tries again."
                    );
                    backoff.wait().await;
                    continue;
                }
            };
            let connector = connector::Connector {
                dialler: &dialler,
                generations: &generations,
                incarnation: &self.incarnation,
                service,
                end,
                tasks,
            };
            // Ends when the certificate seems to be of no use any more.
            tokio::select! {
                () = self.keep_control(&connector, &mut backoff) => {}
                never = bulk::run(&self.bulk_trigger, &connector) => match never {},
            }
        }
    }

    /// Keeps a control connection, until the certificate has ended or is refused: the gateway's
    /// clock may be another, and the gateway's counts.
    async fn keep_control<S: Serve>(
        &self,
        connector: &connector::Connector<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
        backoff: &mut Backoff,
    ) {
        let mut rejections = 0;
        // Of one that had ended before it was used, this clock says nothing that helps.
        let ended_before = !self.credentials.has_valid_certificate(self.clock.now());
        while rejections < MAX_REJECTIONS
            && (ended_before || self.credentials.has_valid_certificate(self.clock.now()))
        {
            match connector.serve(ConnectionKind::Control, || self.link_monitor.linked()).await {
                Ok(connector::Served::Accepted) => {
                    tracing::info!("The link to the gateway ended; it is linked again.");
                    self.link_monitor.unlinked();
                    backoff.reset();
                    rejections = 0;
                }
                Ok(connector::Served::Rejected) => {
                    rejections += 1;
                    tracing::warn!("The gateway did not let the cell in; it tries again.");
                }
                Err(error) => tracing::warn!(
                    error = &error as &dyn Error,
                    "The gateway could not be reached; the cell tries again."
                ),
            }
            backoff.wait().await;
        }
        tracing::info!("The cell asks for a new certificate.");
    }

    /// Gets a certificate: by the token, or, when it has been spent, by the key that it was spent
    /// for.
    async fn enrol(
        &self,
        end: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Result<(), enrol::EnrolError> {
        let token = if self.credentials.has_certificate() { "" } else { &self.bootstrap.token };
        let enrolled = enrol::enrol(
            &self.bootstrap,
            token,
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
                "The new certificate has ended already by this cell's clock: it differs from the gateway's, which counts."
            );
        }
        Ok(())
    }
}
