//! Wiring of all parts, and the daemon's life.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kiyot_config::{BackendConfig, Config};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    admin::{self, AdminApi},
    backends::{
        Backend, BackendName,
        cri::CriBackend,
        milpa::{self, Milpa, inventory::Inventory},
        registry::{Registry, RegistryError},
    },
    kubernetes::{Counters, Kubernetes},
    metrics::{Exposition, Process, Source},
    proxy::{self, CriServer, RunningServer},
    recent_log::RecentLog,
};

mod clock;
mod health;
mod metrics_server;
mod reload;
mod systemd;

use health::Health;
use metrics_server::MetricsServer;

/// Threads of the main runtime. Its tasks wait for cells, not for processors.
const WORKER_THREADS: usize = 2;

/// Failure to start, or an unexpected end.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The main runtime or its signal handlers can't be set up.
    #[error("main runtime can't be started")]
    Runtime(#[source] io::Error),
    /// A milpa backend does not start.
    #[error(transparent)]
    Milpa(#[from] milpa::StartError),
    /// The backends don't fit together.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The CRI socket can't be served.
    #[error(transparent)]
    Front(#[from] proxy::StartError),
    /// No backend answers for the node. A checked configuration has a node backend.
    #[error("no backend of type cri answers for the node")]
    NoNodeBackend,
    /// The thread of the CRI socket has ended without a shutdown.
    #[error("CRI socket closed unexpectedly")]
    Closed,
}

/// Running daemon.
#[derive(Debug)]
pub struct App {
    front: RunningServer,
    milpas: Vec<Arc<Milpa>>,
    _metrics: Option<MetricsServer>,
    admin: AdminApi,
    kubernetes: Option<Kubernetes>,
    /// The running configuration, for the admin API.
    current_config: watch::Sender<Arc<Config>>,
}

impl App {
    /// Starts all parts on the main runtime. The CRI socket starts after the backends, so that the
    /// first call finds all recovered pods. `take_over` ends instances of this node that a daemon
    /// with another state directory launched. `git_commit` is the commit of the build.
    pub async fn start(
        config: &Config,
        take_over: bool,
        recent_log: RecentLog,
        git_commit: Option<&'static str>,
    ) -> Result<Self, AppError> {
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
                    let milpa = Milpa::start(&name, milpa, take_over).await?;
                    if config.kubernetes.budgets {
                        milpa.keep_budgets().await?;
                    }
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
            .ok_or(AppError::NoNodeBackend)?;
        let registry = Registry::new(backends, &node)?;
        let calls = config.metrics.listen.map(|_| proxy::cri_calls(&registry));
        let current_config = watch::Sender::new(Arc::new(config.clone()));
        let runtimes = config.backends.iter().filter_map(|(name, backend)| {
            Inventory::summary_of_runtime(name, backend, name == node.as_str())
        });
        let parts = admin::Parts::new(
            milpas.clone(),
            runtimes.collect(),
            current_config.subscribe(),
            recent_log,
            git_commit,
        );
        let api_counters = Counters::new();
        let kubernetes = Kubernetes::start(&config.kubernetes, &milpas, api_counters.clone());
        let front =
            CriServer::start(&config.server, config.routing.clone(), registry, calls.clone())?;
        // A task opens the admin socket, so that a slow open does not delay the CRI socket.
        let admin = AdminApi::start(&config.admin, parts);
        let metrics = config.metrics.listen.zip(calls).map(|(listen, calls)| {
            let mut sources: Vec<Arc<dyn Source>> = vec![calls, Arc::new(Process), api_counters];
            sources.extend(milpas.iter().flat_map(|milpa| milpa.metrics()));
            let health = Health::new(front.watchdog.clone(), front.address.clone());
            MetricsServer::start(listen, Exposition::new(sources), health)
        });
        Ok(Self { front, milpas, _metrics: metrics, admin, kubernetes, current_config })
    }

    /// Returns the path of the CRI socket.
    pub fn socket(&self) -> &PathBuf {
        &self.front.address
    }

    /// Drains open calls, and ends all parts. Pods go on.
    pub async fn stop(self, config: &Config) {
        if !self.front.drain.drain(config.server.drain_timeout).await {
            tracing::warn!(drain_timeout = ?config.server.drain_timeout, "calls reset after \
                drain_timeout");
        }
        self.admin.shutdown().await;
        drop(self.kubernetes);
        for milpa in self.milpas {
            milpa.shutdown().await;
        }
    }
}

/// Runs the daemon until SIGTERM or SIGINT. Reloads read the configuration from `path`.
pub fn run(
    path: &Path,
    config: Config,
    take_over: bool,
    recent_log: RecentLog,
    git_commit: Option<&'static str>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .thread_name("kiyot")
        .enable_all()
        .build()
        .map_err(AppError::Runtime)?;
    Ok(runtime.block_on(serve(path, config, take_over, recent_log, git_commit))?)
}

async fn serve(
    path: &Path,
    mut config: Config,
    take_over: bool,
    recent_log: RecentLog,
    git_commit: Option<&'static str>,
) -> Result<(), AppError> {
    // Installed before the start: a signal during the start ends the daemon right after the start.
    let mut terminate = signal(SignalKind::terminate()).map_err(AppError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(AppError::Runtime)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(AppError::Runtime)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        commit = git_commit.unwrap_or_default(),
        config = %path.display(),
        backends = config.backends.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        rules = config.routing.rules.len(),
        default = config.routing.default,
        "daemon starting"
    );
    let app = App::start(&config, take_over, recent_log, git_commit).await?;
    systemd::ready();
    let watchdog = app.front.watchdog.clone();
    let mut watchdog_feed = std::pin::pin!(systemd::feed_watchdog(&watchdog));
    let mut clock = clock::Clock::now();
    let mut clock_checks = tokio::time::interval(clock::CHECK_INTERVAL);
    clock_checks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let signal_name = loop {
        tokio::select! {
            _ = terminate.recv() => break "SIGTERM",
            _ = interrupt.recv() => break "SIGINT",
            _ = clock_checks.tick() => clock.check(),
            _ = hangup.recv() => {
                systemd::reloading();
                tokio::select! {
                    () = app.reload(path, &mut config) => {}
                    never = &mut watchdog_feed => match never {},
                }
                systemd::ready();
            }
            never = &mut watchdog_feed => match never {},
            () = app.front.drain.ended() => return Err(AppError::Closed),
        }
    };
    tracing::info!(signal = signal_name, "daemon stopping, pods in cells go on");
    systemd::stopping(config.server.drain_timeout);
    tokio::select! {
        () = app.stop(&config) => {}
        never = &mut watchdog_feed => match never {},
    }
    Ok(())
}
