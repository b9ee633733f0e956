//! The agent of a cell (`kiyot-cell agent`): serves the gateway's calls on connections that it
//! dials.

pub mod bind;
pub mod blobs;
pub mod boot;
pub mod changing_calls;
pub mod clock;
mod digest;
pub mod ephemeral_storage;
pub mod files;
pub mod forward;
pub mod layers;
mod lease;
pub mod logs;
pub mod metrics;
pub mod network;
pub mod pulls;
pub mod registries;
pub mod resolver;
pub mod runtime;
pub mod runtime_watch;
pub mod service;
pub mod shutdown;
pub mod state;
pub mod stats;
pub mod tunnel;
pub mod watch;

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kiyot_link::bootstrap::{CellFile, CellFileError};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing_subscriber::EnvFilter;

use self::{
    changing_calls::ChangingCalls, ephemeral_storage::EphemeralStorage, files::Files,
    metrics::MetricsSubscription, resolver::Resolver, runtime::Runtime, state::CellState,
    watch::Watchers,
};
use crate::{
    dirs::{CellDir, DirError},
    init::POWER_OFF_EXIT_CODE,
    namespaces::{LINK_NAMESPACE, Namespaces, OwnNamespaces},
    power_off,
    uplink::{Outcome, Uplink, UplinkError},
};

pub use service::{Dispatcher, service};

/// Build id that the agent reports to the gateway.
pub const BUILD_ID: &str = concat!("kiyot-cell/", env!("CARGO_PKG_VERSION"));
/// Time for the reply to `Shutdown` to leave the cell before the uplink is closed.
const SHUTDOWN_REPLY_GRACE: Duration = Duration::from_millis(200);
/// Upper bound on threads for blocking work: files, logs, netlink.
const MAX_BLOCKING_THREADS: usize = 8;
/// Time that an orphaned agent spends on stopping its pod before the cell powers off anyway.
const ORPHAN_STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Errors that keep the agent from starting.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The cell's directory can't be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// `cell.json` can't be read.
    #[error(transparent)]
    CellFile(#[from] CellFileError),
    /// The uplink can't be prepared.
    #[error(transparent)]
    Uplink(#[from] UplinkError),
    /// A step of the start failed; the message names the step.
    #[error("cannot {0}")]
    Step(&'static str, #[source] io::Error),
}

/// State shared by the agent's service on all connections.
pub struct AgentContext {
    cell: String,
    dir: CellDir,
    own: OwnNamespaces,
    owns_machine: bool,
    pause_image: String,
    runtime: Runtime,
    files: Arc<Files>,
    state: Arc<CellState>,
    watchers: Watchers,
    metrics_subscription: Arc<MetricsSubscription>,
    ephemeral_storage: Arc<EphemeralStorage>,
    resolver: Arc<Resolver>,
    stream_port: u16,
    tunnels: Arc<Semaphore>,
    file_changes: Arc<Semaphore>,
    file_change_lock: Arc<Mutex<()>>,
    blobs: Arc<Semaphore>,
    pulls: Arc<Semaphore>,
    changing_calls: Arc<ChangingCalls>,
    bulk: OpenBulk,
    power_off: CancellationToken,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl fmt::Debug for AgentContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentContext")
            .field("cell", &self.cell)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Callback that requests a bulk connection from the uplink.
pub struct OpenBulk(Box<dyn Fn() + Send + Sync>);

impl OpenBulk {
    /// Wraps a function, which must return at once.
    pub fn new(open: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Box::new(open))
    }

    fn call(&self) {
        (self.0)();
    }
}

impl fmt::Debug for OpenBulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenBulk")
    }
}

/// Parameters of [`AgentContext::start`].
#[derive(Debug)]
pub struct AgentParts {
    /// Id of the cell.
    pub cell: String,
    /// Directory of the cell.
    pub dir: CellDir,
    /// Namespaces that the cell doesn't share with the host.
    pub own: OwnNamespaces,
    /// True if the machine belongs to the cell, so that the agent sets its network and its clock.
    pub owns_machine: bool,
    /// Image of pod sandboxes.
    pub pause_image: String,
    /// Socket of the cell's containerd.
    pub socket: PathBuf,
    /// Loopback port of containerd's streaming server.
    pub stream_port: u16,
    /// Requests a bulk connection.
    pub bulk: OpenBulk,
    /// Cancelled when the daemon calls `Shutdown`.
    pub power_off: CancellationToken,
}

impl AgentContext {
    /// Starts the tasks that follow containerd, logs and disk usage. They end when the context is
    /// dropped.
    pub fn start(parts: AgentParts) -> io::Result<Arc<Self>> {
        let AgentParts {
            cell,
            dir,
            own,
            owns_machine,
            pause_image,
            socket,
            stream_port,
            bulk,
            power_off,
        } = parts;
        let runtime = Runtime::new(socket);
        let state = Arc::new(CellState::default());
        let files = Arc::new(Files::open(&dir.pod(), &dir.memory())?);
        let ephemeral_storage = Arc::<EphemeralStorage>::default();
        let changing_calls = Arc::new(ChangingCalls::new(forward::MAX_DETACHED_CALLS));
        let watcher = runtime_watch::RuntimeWatcher::new(
            runtime.clone(),
            Arc::clone(&state),
            Arc::clone(&ephemeral_storage),
            Arc::clone(&changing_calls),
            dir.pod(),
        );
        let mut tasks = vec![
            AbortOnDropHandle::new(tokio::spawn(watcher.run())),
            AbortOnDropHandle::new(tokio::spawn(logs::follow(Arc::clone(&state), dir.pod()))),
            AbortOnDropHandle::new(tokio::spawn(logs::enforce_retention(dir.pod()))),
            AbortOnDropHandle::new(tokio::spawn(ephemeral_storage::enforce(
                Arc::clone(&ephemeral_storage),
                runtime.clone(),
                dir.clone(),
            ))),
        ];
        if owns_machine {
            tasks.push(AbortOnDropHandle::new(tokio::spawn(power_off::renew())));
        }
        Ok(Arc::new(Self {
            cell,
            own,
            owns_machine,
            pause_image,
            runtime,
            files,
            state,
            watchers: Watchers::default(),
            metrics_subscription: Arc::default(),
            ephemeral_storage,
            resolver: Arc::new(Resolver::new(own.net)),
            stream_port,
            tunnels: Arc::new(Semaphore::new(service::MAX_TUNNELS)),
            file_changes: Arc::new(Semaphore::new(service::MAX_FILE_CHANGES)),
            file_change_lock: Arc::default(),
            blobs: Arc::new(Semaphore::new(service::MAX_BLOB_WRITES)),
            pulls: Arc::new(Semaphore::new(service::MAX_PULL_WATCHES)),
            changing_calls,
            bulk,
            power_off,
            dir,
            _tasks: tasks,
        }))
    }
}

/// Runs the agent until the cell must power off. Returns the exit code [`POWER_OFF_EXIT_CODE`].
pub fn run(dir: &Path, stream_port: u16) -> Result<i32, AgentError> {
    let filter =
        EnvFilter::try_from_env("KIYOT_CELL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .build()
        .map_err(|source| AgentError::Step("start the tokio runtime", source))?;
    let code = runtime.block_on(live(dir, stream_port))?;
    runtime.shutdown_background();
    Ok(code)
}

async fn live(dir: &Path, stream_port: u16) -> Result<i32, AgentError> {
    let dir = CellDir::open(dir)?;
    let file = CellFile::read(&dir.cell_file())?;
    let cell = file.bootstrap.cell.clone();
    let current = Namespaces::current()
        .map_err(|source| AgentError::Step("read the agent's namespaces", source))?;
    let own = match &file.machine {
        Some(_) => OwnNamespaces { uts: true, net: true },
        None => OwnNamespaces::compare(Namespaces::read(&dir.host_namespaces()).ok(), current),
    };
    let mut uplink = Uplink::new(file.bootstrap, &dir.agent(), BUILD_ID)?;
    if file.machine.as_ref().is_some_and(|machine| machine.link.is_some()) {
        uplink = uplink.from_namespace(LINK_NAMESPACE.into());
    }
    let handle = uplink.handle();
    let power_off = CancellationToken::new();
    let context = AgentContext::start(AgentParts {
        cell: cell.clone(),
        dir,
        own,
        owns_machine: file.machine.is_some(),
        pause_image: file.pause_image,
        socket: PathBuf::from(crate::init::containerd::SOCKET),
        stream_port,
        bulk: OpenBulk::new(move || handle.open_bulk()),
        power_off: power_off.clone(),
    })
    .map_err(|source| AgentError::Step("open the pod's directories", source))?;
    tracing::info!(cell, own_host_name = own.uts, own_network = own.net, "agent started");

    // The uplink stays open for [`SHUTDOWN_REPLY_GRACE`], so that the reply to `Shutdown` is sent.
    let unlink = CancellationToken::new();
    let end = async {
        power_off.cancelled().await;
        tokio::time::sleep(SHUTDOWN_REPLY_GRACE).await;
        unlink.cancel();
        std::future::pending::<Outcome>().await
    };
    let served = Arc::clone(&context);
    let linked =
        uplink.run(move |connection| service(Arc::clone(&served), connection), unlink.clone());
    let outcome = tokio::select! {
        outcome = linked => outcome,
        outcome = end => outcome,
    };
    match outcome {
        Outcome::Shutdown => tracing::info!("shutdown requested by the gateway"),
        Outcome::Orphaned => {
            tracing::error!(
                "gateway not reached within the orphan timeout, stopping the pod and powering off"
            );
            match tokio::time::timeout(ORPHAN_STOP_TIMEOUT, shutdown::stop_all(&context.runtime))
                .await
            {
                Ok(Ok(())) => {}
                Ok(Err(status)) => {
                    tracing::warn!(
                        code = ?status.code(),
                        message = status.message(),
                        "pod not stopped before power-off"
                    )
                }
                Err(_) => tracing::warn!("pod not stopped before power-off: containerd timed out"),
            }
        }
    }
    Ok(POWER_OFF_EXIT_CODE)
}
