//! The CRI front door: a unix socket that speaks HTTP/2, on a thread of its own.
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
mod connection;
mod decoded;
mod events;
mod forward;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod incoming;
mod knock;
mod listener;
mod lookup;
mod merge;
mod owners;
pub mod peek;
mod pulse;
mod pump;
pub mod routing;
mod shared;
mod stall;
pub mod table;
mod timeout;

use connection::Stop;
pub use listener::ListenError;
use listener::Listener;
use owners::Owners;
pub use pulse::Pulse;
use shared::{Settings, Shared};

/// Connections at most. The kubelet has one or two, each crictl another.
const MAX_CONNECTIONS: usize = 1024;
/// How long to wait after the kernel refused a connection, for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the thread may take to end after all connections were cut.
const THREAD_END: Duration = Duration::from_secs(5);

/// The front door could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its socket can't be had.
    #[error("the CRI socket can't be opened")]
    Listen(#[from] ListenError),
    /// [`Front::start`] was called outside of the main runtime.
    #[error("there is no runtime to answer calls on")]
    NoRuntime(#[from] tokio::runtime::TryCurrentError),
    /// Its thread or that thread's runtime can't be made.
    #[error("the thread of the CRI socket can't be started")]
    Thread(#[source] io::Error),
}

/// The CRI front door.
#[derive(Debug)]
pub struct Front;

/// An open front door.
#[derive(Debug)]
pub struct Bound {
    /// The socket.
    pub address: PathBuf,
    /// Closes it. Dropping this cuts all connections.
    pub drain: DrainHandle,
    /// Changes what may change while it is open.
    pub settings: SettingsHandle,
    /// Whether its thread still does something.
    pub pulse: Pulse,
}

/// Changes rules and limits of an open front door.
#[derive(Debug)]
pub struct SettingsHandle(watch::Sender<Arc<Settings>>);

impl SettingsHandle {
    /// Sets the rules, and of `[server]` `client_timeout` and `max_concurrent_calls`, all at once.
    /// Calls that are open go on as they began.
    pub fn replace(&self, server: &Server, routing: Routing) {
        self.0.send_replace(Arc::new(Settings::new(server, routing)));
    }
}

/// Closes the front door.
#[derive(Debug)]
pub struct DrainHandle {
    stop: Stop,
    ended: CancellationToken,
}

impl Front {
    /// Opens the front door. To be called on the main runtime, which will answer decoded calls.
    pub fn start(
        config: &Server,
        routing: Routing,
        registry: Registry,
    ) -> Result<Bound, StartError> {
        let (stop, ended) = (Stop::default(), CancellationToken::new());
        let shared = Shared {
            registry,
            owners: Owners::default(),
            main: Handle::try_current()?,
            open_calls: AtomicUsize::new(0),
            drain: stop.drain.clone(),
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
        let (settings, settings_of_thread) =
            watch::channel(Arc::new(Settings::new(config, routing)));
        let (stop_of_thread, ended_of_thread) = (stop.clone(), ended.clone().drop_guard());
        let address = config.listen.clone();
        let (pulse, heart) = pulse::new();
        // It ends with the runtime, if not before.
        runtime.spawn(heart.beat());
        let run = move || {
            let _ended = ended_of_thread;
            runtime.block_on(accept(
                listener,
                socket,
                Arc::new(shared),
                settings_of_thread,
                stop_of_thread,
            ));
        };
        thread::Builder::new().name("cri-front".into()).spawn(run).map_err(StartError::Thread)?;
        tracing::info!(socket = %address.display(), "listening for the kubelet");
        Ok(Bound {
            address,
            drain: DrainHandle { stop, ended },
            settings: SettingsHandle(settings),
            pulse,
        })
    }
}

impl DrainHandle {
    /// Takes no more calls, tells clients so (GOAWAY), waits until those that are open have ended,
    /// for `patience` at most, and cuts what is left. Whether all had ended.
    pub async fn drain(&self, patience: Duration) -> bool {
        self.stop.drain.cancel();
        if timeout(patience, self.ended.cancelled()).await.is_ok() {
            return true;
        }
        self.stop.reset.cancel();
        if timeout(THREAD_END, self.ended.cancelled()).await.is_err() {
            tracing::warn!("the thread of the CRI socket does not end");
        }
        false
    }

    /// Ready when the front door has closed, which it does by itself only if its thread failed.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

impl Drop for DrainHandle {
    fn drop(&mut self) {
        self.stop.drain.cancel();
        self.stop.reset.cancel();
    }
}

/// Accepts connections until told to stop, then waits for their end.
async fn accept(
    listener: Listener,
    socket: UnixListener,
    front: Arc<Shared>,
    settings: watch::Receiver<Arc<Settings>>,
    stop: Stop,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.drain.cancelled() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => log_panic(ended),
            accepted = socket.accept() => match accepted {
                Ok((stream, _)) if connections.len() < MAX_CONNECTIONS => {
                    connections.spawn(connection::serve(stream, front.clone(), settings.clone(), stop.clone()));
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
