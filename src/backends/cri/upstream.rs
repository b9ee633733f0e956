//! One shared connection to a container runtime, opened at the first call and again after it was
//! lost.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::request::Parts;
use kiyot_http2::{
    Error, SendStream,
    client::{ResponseFuture, SendRequest},
};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::connect::{self, ConnectError};

/// Connections that the runtime told us to leave and that still have calls open. Of more than these
/// the oldest is cut.
const MAX_RETIRED_CONNECTIONS: usize = 4;

/// The container runtime can't be called.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    /// There is no connection.
    #[error("no connection to the container runtime at {}", socket.display())]
    Connect {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        source: Arc<ConnectError>,
    },
    /// It did not let us connect in time.
    #[error("no connection to the container runtime at {} within {after:?}", socket.display())]
    ConnectTimeout {
        /// Its socket.
        socket: PathBuf,
        /// How long it had.
        after: Duration,
    },
    /// The connection ended in the middle of the call.
    #[error("the container runtime at {} ended the connection before it answered", socket.display())]
    Lost {
        /// Its socket.
        socket: PathBuf,
        /// How.
        source: Error,
    },
}

/// A container runtime's CRI socket. Its connection lives on the runtime of the thread that calls
/// first; all callers are to be on that thread.
#[derive(Debug)]
pub struct Upstream {
    socket: PathBuf,
    connect_timeout: Duration,
    state: Mutex<State>,
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    live: Option<SendRequest>,
    generation: u64,
    /// The last try to connect failed, and the log says so.
    is_down: bool,
    /// The last drives the live connection.
    drivers: VecDeque<AbortOnDropHandle<()>>,
}

/// A call under way.
#[derive(Debug)]
pub struct UpstreamCall {
    /// Its answer. Dropping this and the stream cancels the call.
    pub response: ResponseFuture,
    /// What is still to be sent.
    pub stream: SendStream,
}

impl Upstream {
    /// Of a socket. Nothing is connected before the first call.
    pub fn new(socket: PathBuf, connect_timeout: Duration) -> Self {
        Self {
            socket,
            connect_timeout,
            state: Mutex::default(),
            connecting: tokio::sync::Mutex::new(()),
        }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The error of a call whose connection was lost.
    pub fn connection_lost(&self, source: Error) -> Unavailable {
        Unavailable::Lost { socket: self.socket.clone(), source }
    }

    /// Sends a request's metadata and the first part of its body (or, if `ended`, all of it), on a
    /// new connection if the present one does not take it.
    pub async fn send(
        &self,
        head: &Parts,
        body: &Bytes,
        ended: bool,
    ) -> Result<UpstreamCall, Unavailable> {
        let mut again = true;
        loop {
            let (generation, live) = match self.live() {
                Some(live) => live,
                None => self.connect().await?,
            };
            match live.send_request(head, body, ended) {
                Ok((response, stream)) => return Ok(UpstreamCall { response, stream }),
                // Nothing was sent.
                Err(error) => {
                    self.retire(generation);
                    if !std::mem::take(&mut again) {
                        return Err(self.connection_lost(error));
                    }
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Option<(u64, SendRequest)> {
        let state = self.state();
        let live = state.live.clone()?;
        state
            .drivers
            .back()
            .is_some_and(|driver| !driver.is_finished())
            .then_some((state.generation, live))
    }

    /// No call is to use this connection any more; those on it go on.
    fn retire(&self, generation: u64) {
        let mut state = self.state();
        if state.generation == generation {
            state.live = None;
        }
    }

    async fn connect(&self) -> Result<(u64, SendRequest), Unavailable> {
        let timed_out = || Unavailable::ConnectTimeout {
            socket: self.socket.clone(),
            after: self.connect_timeout,
        };
        let connected = timeout(self.connect_timeout, self.connect_or_join())
            .await
            .unwrap_or_else(|_| Err(timed_out()));
        let was_down = std::mem::replace(&mut self.state().is_down, connected.is_err());
        // Once for each outage: a kubelet calls several times a second.
        match &connected {
            Err(error) if !was_down => {
                tracing::warn!(
                    error = error as &dyn std::error::Error,
                    "The container runtime does not answer: its pods' calls fail"
                )
            }
            Ok(_) if was_down => {
                tracing::info!(socket = %self.socket.display(), "The container runtime answers again")
            }
            _ => {}
        }
        connected
    }

    /// Connects, or waits for another call that does so.
    async fn connect_or_join(&self) -> Result<(u64, SendRequest), Unavailable> {
        let _one_at_a_time = self.connecting.lock().await;
        if let Some(live) = self.live() {
            return Ok(live);
        }
        let (requests, connection) = connect::open(&self.socket).await.map_err(|error| {
            Unavailable::Connect { socket: self.socket.clone(), source: Arc::new(error) }
        })?;
        let socket = self.socket.clone();
        tracing::debug!(socket = %socket.display(), "connected to the container runtime");
        let driver = tokio::spawn(async move {
            match connection.await {
                Ok(()) => {
                    tracing::debug!(socket = %socket.display(), "the connection to the container runtime has served")
                }
                Err(error) => {
                    tracing::info!(socket = %socket.display(), %error, "the connection to the container runtime was lost")
                }
            }
        });
        let mut state = self.state();
        state.drivers.retain(|driver| !driver.is_finished());
        if state.drivers.len() > MAX_RETIRED_CONNECTIONS {
            state.drivers.pop_front();
        }
        state.drivers.push_back(AbortOnDropHandle::new(driver));
        state.generation += 1;
        state.live = Some(requests.clone());
        Ok((state.generation, requests))
    }
}
