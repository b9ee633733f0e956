//! The CRI server: HTTP/2 on a unix socket, on a thread of its own.
//!
//! Calls are not decoded: the path and at most an id or the sandbox config decide which backend
//! answers. Calls to a container runtime are forwarded byte for byte. Calls to a decoded backend
//! are passed to the main runtime as one message.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
    thread,
    time::Duration,
};

use kiyot_config::{Routing, Server};
use tokio::{
    net::UnixListener,
    runtime::{Builder, Handle, Runtime},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    backends::{Method, registry::Registry},
    metrics::CriCalls,
    unix_listener::{self, Listener},
};

mod call;
mod caller;
mod cell_guard;
mod connection;
mod copy_body;
mod deadline;
mod decoded;
mod events;
mod fan_out;
mod forward;
mod frame;
#[cfg(debug_assertions)]
#[path = "../fuzz/inside/proxy.rs"]
pub mod fuzzing;
mod id_cache;
mod idle_timeout;
mod incoming;
mod lookup;
mod merge;
pub mod methods;
pub mod peek;
mod plan;
pub mod routing;
mod serve;
mod server_state;
mod trace_context;
mod watchdog;

pub use crate::unix_listener::ListenError;
use connection::Shutdown;
use id_cache::IdCache;
use server_state::{ServerState, Settings};
pub use watchdog::Watchdog;

/// Bound on connections. The kubelet has one or two, and each crictl one.
const MAX_CONNECTIONS: usize = 1024;
/// Pause after a failed accept, such as by EMFILE or ENOMEM.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of the thread's end after all connections are cut.
const THREAD_END_TIMEOUT: Duration = Duration::from_secs(5);

/// A CRI server that failed to start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Binding the socket failed.
    #[error("the CRI socket can't be opened")]
    Listen(#[from] ListenError),
    /// [`CriServer::start`] was called outside of a tokio runtime.
    #[error("the CRI server was started outside of a tokio runtime")]
    NoRuntime(#[from] tokio::runtime::TryCurrentError),
    /// The thread or its tokio runtime can't be made.
    #[error("the thread of the CRI socket can't be started")]
    Thread(#[source] io::Error),
}

/// Returns counters of the calls to the backends of a registry.
pub fn cri_calls(registry: &Registry) -> Arc<CriCalls> {
    let methods = Method::ALL.iter().map(|method| method.name());
    CriCalls::new(methods, registry.names().map(|name| name.as_str().to_owned()))
}

/// The CRI server.
#[derive(Debug)]
pub struct CriServer;

/// A running CRI server.
#[derive(Debug)]
pub struct RunningServer {
    /// Path of the socket.
    pub address: PathBuf,
    /// Stops the server. Dropping this cuts all connections.
    pub drain: DrainHandle,
    /// Changes the settings.
    pub settings: SettingsHandle,
    /// Checks that the thread makes progress.
    pub watchdog: Watchdog,
}

/// Handle that changes rules and limits of a running server.
#[derive(Debug)]
pub struct SettingsHandle(watch::Sender<Arc<Settings>>);

impl SettingsHandle {
    /// Replaces the rules, `client_timeout` and `max_concurrent_calls` at once. Open calls keep
    /// the settings with which they began.
    pub fn replace(&self, server: &Server, routing: Routing) {
        self.0.send_replace(Arc::new(Settings::new(server, routing)));
    }
}

/// Handle that stops a server.
#[derive(Debug)]
pub struct DrainHandle {
    shutdown: Shutdown,
    ended: CancellationToken,
}

impl CriServer {
    /// Starts a server. Decoded calls run on the current tokio runtime. `calls` counts the calls
    /// ([`cri_calls`]); without it no call is counted.
    pub fn start(
        config: &Server,
        routing: Routing,
        registry: Registry,
        calls: Option<Arc<CriCalls>>,
    ) -> Result<RunningServer, StartError> {
        let (shutdown, ended) = (Shutdown::default(), CancellationToken::new());
        let state = ServerState {
            registry,
            id_cache: IdCache::default(),
            main: Handle::try_current()?,
            open_calls: AtomicUsize::new(0),
            calls,
            drain: shutdown.drain.clone(),
        };
        // Opened before the thread's runtime is made: an error would drop that runtime within
        // another, which tokio forbids.
        let listener = unix_listener::listen_on(&config.listen, None)?;
        let socket = listener.socket.try_clone().map_err(StartError::Thread)?;
        let runtime =
            Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let socket = {
            let _in_runtime = runtime.enter();
            UnixListener::from_std(socket)
        };
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => {
                runtime.shutdown_background();
                return Err(StartError::Thread(error));
            }
        };
        let (settings, thread_settings) = watch::channel(Arc::new(Settings::new(config, routing)));
        let (thread_shutdown, thread_ended) = (shutdown.clone(), ended.clone().drop_guard());
        let address = config.listen.clone();
        let (watchdog, responder) = watchdog::new();
        // Ends with the runtime at the latest.
        runtime.spawn(responder.run());
        // Sent to the thread after the spawn: a failed spawn drops its closure, and the runtime
        // must not be dropped here.
        let (hand_over, runtime_of_thread) = std::sync::mpsc::channel::<Runtime>();
        let run = move || {
            let _ended = thread_ended;
            let Ok(runtime) = runtime_of_thread.recv() else { return };
            runtime.block_on(accept(
                listener,
                socket,
                Arc::new(state),
                thread_settings,
                thread_shutdown,
            ));
        };
        if let Err(error) = thread::Builder::new().name("cri-front".into()).spawn(run) {
            runtime.shutdown_background();
            return Err(StartError::Thread(error));
        }
        // The thread waits for the runtime.
        let _ = hand_over.send(runtime);
        tracing::info!(socket = %address.display(), "listening for the kubelet");
        Ok(RunningServer {
            address,
            drain: DrainHandle { shutdown, ended },
            settings: SettingsHandle(settings),
            watchdog,
        })
    }
}

impl DrainHandle {
    /// Sends GOAWAY, waits at most `limit` for open calls, and cuts the rest. Returns whether all
    /// calls ended in time.
    pub async fn drain(&self, limit: Duration) -> bool {
        self.shutdown.drain.cancel();
        if timeout(limit, self.ended.cancelled()).await.is_ok() {
            return true;
        }
        self.shutdown.reset.cancel();
        if timeout(THREAD_END_TIMEOUT, self.ended.cancelled()).await.is_err() {
            tracing::warn!(
                timeout = ?THREAD_END_TIMEOUT,
                "thread of the CRI socket did not end in time"
            );
        }
        false
    }

    /// Completes when the server has ended. Without a drain, its thread has failed.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

impl Drop for DrainHandle {
    fn drop(&mut self) {
        self.shutdown.drain.cancel();
        self.shutdown.reset.cancel();
    }
}

/// Accepts connections until the drain, then waits for their end.
async fn accept(
    listener: Listener,
    socket: UnixListener,
    server: Arc<ServerState>,
    settings: watch::Receiver<Arc<Settings>>,
    shutdown: Shutdown,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = shutdown.drain.cancelled() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => log_panic(ended),
            accepted = socket.accept() => match accepted {
                Ok((stream, _)) if connections.len() < MAX_CONNECTIONS => {
                    connections.spawn(connection::serve(
                        stream,
                        server.clone(),
                        settings.clone(),
                        shutdown.clone(),
                    ));
                }
                Ok(_) => tracing::warn!(limit = MAX_CONNECTIONS, "connection limit reached"),
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop((socket, listener));
    while let Some(ended) = connections.join_next().await {
        log_panic(ended);
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if ended.is_err_and(|error| error.is_panic()) {
        tracing::error!("connection panicked");
    }
}
