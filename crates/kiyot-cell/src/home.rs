//! Home: the agent's side of the link. It enrols, dials the gateway, serves calls on the
//! connections that it made, and dials again when they end.

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
    bulk::Wish,
    contact::Contact,
    dial::{DialError, Dialler},
    identity::{IdentityError, Keys},
};

mod backoff;
mod bulk;
mod contact;
mod control;
mod dial;
mod enrol;
mod identity;
mod serve;

pub use contact::LinkState;

/// How long one attempt to connect may take: dial, TLS, and the gateway's first call.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How long one attempt to enrol may take.
const ENROL_TIMEOUT: Duration = Duration::from_secs(20);

/// After this many refusals in a row a certificate is taken for one that is of no use.
const REFUSALS: u32 = 5;

/// How long what still runs at the end may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

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
pub enum HomeError {
    /// Its key could not be made, read or kept.
    #[error("the agent's key and certificate")]
    Identity(#[from] IdentityError),
    /// No random bytes from the kernel.
    #[error("no random bytes from the kernel")]
    Randomness,
}

/// Why [`Home::run`] returned.
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
pub struct Home {
    bootstrap: Bootstrap,
    build_id: String,
    keys: Keys,
    contact: Contact,
    wish: Wish,
    incarnation: Arc<str>,
    clock: Clock,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Home")
            .field("cell", &self.bootstrap.cell)
            .field("incarnation", &self.incarnation)
            .finish_non_exhaustive()
    }
}

/// What the agent's service needs of its home. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HomeHandle {
    wish: Wish,
    state: watch::Receiver<LinkState>,
}

impl HomeHandle {
    /// Has a bulk connection dialled, unless that is being done or has just been done: what
    /// `OpenBulk` means. Returns at once.
    pub fn open_bulk(&self) {
        self.wish.make();
    }

    /// Whether there is contact, and since when.
    pub fn state(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }
}

impl Home {
    /// Prepares it. Key and certificate are kept in `private_dir` (made with mode 0700), so that an
    /// agent that is started again needs no token.
    pub fn new(
        bootstrap: Bootstrap,
        private_dir: &Path,
        build_id: &str,
    ) -> Result<Self, HomeError> {
        let keys = Keys::load_or_make(private_dir, &bootstrap.cell)?;
        let mut random = [0_u8; 16];
        SystemRandom::new().fill(&mut random).map_err(|_| HomeError::Randomness)?;
        let orphan_timeout = Duration::from_secs(bootstrap.orphan_timeout_secs);
        Ok(Self {
            build_id: build_id.to_owned(),
            keys,
            contact: Contact::new(private_dir, orphan_timeout),
            wish: Wish::default(),
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
    pub fn handle(&self) -> HomeHandle {
        HomeHandle { wish: self.wish.clone(), state: self.contact.state() }
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
            () = self.contact.orphaned() => Outcome::Orphaned,
            never = self.call(&service, &end, &tasks) => match never {},
        };
        end.cancel();
        tasks.close();
        if tokio::time::timeout(END_TIMEOUT, tasks.wait()).await.is_err() {
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
        let mut certify = !self.keys.is_certified(self.clock.now());
        loop {
            if certify && let Err(error) = self.enrol(end, tasks).await {
                tracing::warn!(
                    error = &error as &dyn Error,
                    "The cell could not enrol; it tries again."
                );
            }
            certify = true;
            // One that has ended by this clock, and could not be renewed, may still do by the
            // gateway's.
            let Some(identity) = self.keys.identity() else {
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
            let line = serve::Line {
                dialler: &dialler,
                generations: &generations,
                incarnation: &self.incarnation,
                service,
                end,
                tasks,
            };
            // Ends when the certificate seems to be of no use any more.
            tokio::select! {
                () = self.keep_control(&line, &mut backoff) => {}
                never = bulk::keep(&self.wish, &line) => match never {},
            }
        }
    }

    /// Keeps a control connection, until the certificate has ended or is refused: the gateway's
    /// clock may be another, and the gateway's counts.
    async fn keep_control<S: Serve>(
        &self,
        line: &serve::Line<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
        backoff: &mut Backoff,
    ) {
        let mut refusals = 0;
        // Of one that had ended before it was used, this clock says nothing that helps.
        let ended_before = !self.keys.is_certified(self.clock.now());
        while refusals < REFUSALS && (ended_before || self.keys.is_certified(self.clock.now())) {
            match line.serve(ConnectionKind::Control, || self.contact.made()).await {
                Ok(serve::Served::Called) => {
                    tracing::info!("The link to the gateway ended; it is made again.");
                    self.contact.lost();
                    backoff.reset();
                    refusals = 0;
                }
                Ok(serve::Served::NeverCalled) => {
                    refusals += 1;
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
        let token = if self.keys.was_certified() { "" } else { &self.bootstrap.token };
        let enrolled = enrol::enrol(
            &self.bootstrap,
            token,
            &self.keys,
            &self.build_id,
            &self.clock,
            end,
            tasks,
        );
        let certificate = tokio::time::timeout(ENROL_TIMEOUT, enrolled)
            .await
            .map_err(|_| DialError::TooSlow(ENROL_TIMEOUT))??;
        if !self.keys.keep(&certificate)? {
            return Err(enrol::EnrolError::OtherCertificate);
        }
        if !self.keys.is_certified(self.clock.now()) {
            tracing::warn!(
                "The new certificate has ended already by this cell's clock: it differs from the gateway's, which counts."
            );
        }
        Ok(())
    }
}
