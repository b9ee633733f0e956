//! The CRI server: a unix socket that speaks HTTP/2, on a thread of its own.
//!
//! A call is peeked at, never decoded: its path and at most an id or the sandbox config say whose
//! it is. What belongs to a container runtime is forwarded as it came; what belongs to a decoded
//! backend is handed to the main runtime as one whole message.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
    thread,
    time::Duration,
};

use tokio::{
    net::UnixListener,
    runtime::{Builder, Handle},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    backends::registry::Registry,
    config::{Routing, Server},
};

mod call;
mod caller;
mod child_waker;
mod connection;
mod copy_body;
mod deadline;
mod decoded;
mod events;
mod fan_out;
mod forward;
mod frame;
#[cfg(any(test, fuzzing, debug_assertions))]
#[doc(hidden)]
pub mod fuzzing;
mod id_cache;
mod idle_timeout;
mod incoming;
mod listener;
mod lookup;
mod merge;
pub mod methods;
pub mod peek;
pub mod routing;
mod server_state;
mod watchdog;

use connection::Shutdown;
use id_cache::IdCache;
pub use listener::ListenError;
use listener::Listener;
use server_state::{ServerState, Settings};
pub use watchdog::Watchdog;

/// Connections at most. The kubelet has one or two, each crictl another.
const MAX_CONNECTIONS: usize = 1024;
/// How long to wait after the kernel refused a connection, for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the thread may take to end after all connections were cut.
const THREAD_END_TIMEOUT: Duration = Duration::from_secs(5);

/// The CRI server could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its socket can't be had.
    #[error("the CRI socket can't be opened")]
    Listen(#[from] ListenError),
    /// [`CriServer::start`] was called outside of the main runtime.
    #[error("there is no runtime to answer calls on")]
    NoRuntime(#[from] tokio::runtime::TryCurrentError),
    /// Its thread or that thread's runtime can't be made.
    #[error("the thread of the CRI socket can't be started")]
    Thread(#[source] io::Error),
}

/// The CRI server.
#[derive(Debug)]
pub struct CriServer;

/// An open CRI server.
#[derive(Debug)]
pub struct RunningServer {
    /// The socket.
    pub address: PathBuf,
    /// Closes it. Dropping this cuts all connections.
    pub drain: DrainHandle,
    /// Changes what may change while it is open.
    pub settings: SettingsHandle,
    /// Whether its thread still does something.
    pub watchdog: Watchdog,
}

/// Changes rules and limits of an open CRI server.
#[derive(Debug)]
pub struct SettingsHandle(watch::Sender<Arc<Settings>>);

impl SettingsHandle {
    /// Sets the rules, and of `[server]` `client_timeout` and `max_concurrent_calls`, all at once.
    /// Calls that are open go on as they began.
    pub fn replace(&self, server: &Server, routing: Routing) {
        self.0.send_replace(Arc::new(Settings::new(server, routing)));
    }
}

/// Closes the CRI server.
#[derive(Debug)]
pub struct DrainHandle {
    shutdown: Shutdown,
    ended: CancellationToken,
}

impl CriServer {
    /// Opens the CRI server. To be called on the main runtime, which will answer decoded calls.
    pub fn start(
        config: &Server,
        routing: Routing,
        registry: Registry,
    ) -> Result<RunningServer, StartError> {
        let (shutdown, ended) = (Shutdown::default(), CancellationToken::new());
        let state = ServerState {
            registry,
            id_cache: IdCache::default(),
            main: Handle::try_current()?,
            open_calls: AtomicUsize::new(0),
            drain: shutdown.drain.clone(),
        };
        // Before there is a runtime: one can't be dropped on the main runtime, where this runs.
        let listener = listener::listen_on(&config.listen)?;
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
        // It ends with the runtime, if not before.
        runtime.spawn(responder.run());
        let run = move || {
            let _ended = thread_ended;
            runtime.block_on(accept(
                listener,
                socket,
                Arc::new(state),
                thread_settings,
                thread_shutdown,
            ));
        };
        thread::Builder::new().name("cri-front".into()).spawn(run).map_err(StartError::Thread)?;
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
    /// Takes no more calls, tells clients so (GOAWAY), waits until those that are open have ended,
    /// for `patience` at most, and cuts what is left. Whether all had ended.
    pub async fn drain(&self, patience: Duration) -> bool {
        self.shutdown.drain.cancel();
        if timeout(patience, self.ended.cancelled()).await.is_ok() {
            return true;
        }
        self.shutdown.reset.cancel();
        if timeout(THREAD_END_TIMEOUT, self.ended.cancelled()).await.is_err() {
            tracing::warn!("the thread of the CRI socket does not end");
        }
        false
    }

    /// Ready when the CRI server has closed, which it does by itself only if its thread failed.
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

/// Accepts connections until told to stop, then waits for their end.
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
                    connections.spawn(connection::serve(stream, server.clone(), settings.clone(), shutdown.clone()));
                }
                Ok(_) => tracing::warn!(limit = MAX_CONNECTIONS, "a client was turned away: there are as many connections as there may be"),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
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
        tracing::error!("a connection ended by a panic");
    }
}
