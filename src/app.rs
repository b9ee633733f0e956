//! The one place that wires the parts together.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

use crate::{
    backends::{
        Backend, BackendName,
        cri::CriBackend,
        milpa::{self, Milpa},
        registry::{Registry, RegistryError},
    },
    config::{BackendConfig, Config},
    proxy::{self, CriServer, RunningServer},
};

mod clock;
mod reload;
mod systemd;

/// Threads of the main runtime. What runs there waits for cells, not for the processor.
const WORKERS: usize = 2;

/// Why the daemon does not start, or has ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The main runtime or its signals can't be had.
    #[error("the main runtime can't be started")]
    Runtime(#[source] io::Error),
    /// A backend of cells does not start.
    #[error(transparent)]
    Milpa(#[from] milpa::StartError),
    /// The backends can't be used together.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The front door does not open.
    #[error(transparent)]
    Front(#[from] proxy::StartError),
    /// No backend answers for the node. The configuration's checks don't let this through.
    #[error("no backend of type cri answers for the node")]
    NoNode,
    /// The thread of the CRI socket ended without being told to.
    #[error("the CRI socket has closed by itself")]
    Closed,
}

/// The daemon, wired together and answering.
#[derive(Debug)]
pub struct App {
    front: RunningServer,
    milpas: Vec<Arc<Milpa>>,
}

impl App {
    /// Starts all parts, the front door last: what answers the kubelet knows all pods of before. To
    /// be called on the main runtime.
    pub async fn start(config: &Config) -> Result<Self, AppError> {
        let (mut backends, mut milpas): (Vec<Arc<dyn Backend>>, _) = (Vec::new(), Vec::new());
        let mut only_cri = None;
        for (name, backend) in &config.backends {
            let name = BackendName::new(name);
            match backend {
                BackendConfig::Cri(cri) => {
                    backends.push(Arc::new(CriBackend::new(
                        name.clone(),
                        cri.socket.clone(),
                        cri.connect_timeout,
                    )));
                    only_cri = Some(name);
                }
                BackendConfig::Milpa(milpa) => {
                    let milpa = Milpa::start(&name, milpa).await?;
                    backends.push(milpa.clone());
                    milpas.push(milpa);
                }
            }
        }
        let node = config
            .server
            .node_backend
            .as_deref()
            .map(BackendName::new)
            .or(only_cri)
            .ok_or(AppError::NoNode)?;
        let registry = Registry::new(backends, &node)?;
        let front = CriServer::start(&config.server, config.routing.clone(), registry)?;
        Ok(Self { front, milpas })
    }

    /// The CRI socket.
    pub fn socket(&self) -> &PathBuf {
        &self.front.address
    }

    /// Takes no more calls, waits for those that are open, and ends all parts. No pod is stopped.
    pub async fn stop(self, config: &Config) {
        if !self.front.drain.drain(config.server.drain_timeout).await {
            tracing::warn!(drain_timeout = ?config.server.drain_timeout, "Calls were cut that did not end within drain_timeout.");
        }
        for milpa in self.milpas {
            milpa.shutdown().await;
        }
    }
}

/// Runs the daemon until it is told to stop. `path` is the file that the configuration is of, for
/// reloads.
pub fn run(path: &Path, config: Config) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("kiyot")
        .enable_all()
        .build()
        .map_err(AppError::Runtime)?;
    Ok(runtime.block_on(serve(path, config))?)
}

async fn serve(path: &Path, mut config: Config) -> Result<(), AppError> {
    // Asked for first: a signal during the start ends it as soon as it is complete.
    let mut terminate = signal(SignalKind::terminate()).map_err(AppError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AppError::Runtime)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(AppError::Runtime)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        config = %path.display(),
        backends = config.backends.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        rules = config.routing.rules.len(),
        default = config.routing.default,
        "Kiyot starts"
    );
    let app = App::start(&config).await?;
    systemd::ready();
    let watchdog = app.front.watchdog.clone();
    let mut life = std::pin::pin!(systemd::live(&watchdog));
    let mut clock = clock::Clock::now();
    let mut looks = tokio::time::interval(clock::LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let told = loop {
        tokio::select! {
            _ = terminate.recv() => break "SIGTERM",
            _ = interrupt.recv() => break "SIGINT",
            _ = looks.tick() => clock.look(),
            _ = hangup.recv() => {
                systemd::reloading();
                app.reload(path, &mut config);
                systemd::ready();
            }
            never = &mut life => match never {},
            () = app.front.drain.ended() => return Err(AppError::Closed),
        }
    };
    tracing::info!(signal = told, "Told to stop; pods in cells go on.");
    systemd::stopping();
    tokio::select! {
        () = app.stop(&config) => {}
        never = &mut life => match never {},
    }
    Ok(())
}
