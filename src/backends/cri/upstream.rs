//! The shared connection to a container runtime, opened at the first call and after each loss.

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

/// Largest number of connections with open calls that the runtime has ended by GOAWAY. Beyond it,
/// the oldest connection is closed.
const MAX_RETIRED_CONNECTIONS: usize = 4;

/// Error of a call to an unavailable container runtime.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    /// Connecting failed.
    #[error("no connection to the {peer} at {}", socket.display())]
    Connect {
        /// The kind of the server.
        peer: &'static str,
        /// The runtime's socket.
        socket: PathBuf,
        /// The cause.
        source: Arc<ConnectError>,
    },
    /// Connecting timed out.
    #[error("no connection to the {peer} at {} within {after:?}", socket.display())]
    ConnectTimeout {
        /// The kind of the server.
        peer: &'static str,
        /// The runtime's socket.
        socket: PathBuf,
        /// The timeout.
        after: Duration,
    },
    /// The connection ended during the call.
    #[error("the {peer} at {} ended the connection during the call", socket.display())]
    Lost {
        /// The kind of the server.
        peer: &'static str,
        /// The runtime's socket.
        socket: PathBuf,
        /// The cause.
        source: Error,
    },
}

/// A container runtime's CRI socket. The tokio runtime of the first caller drives its connection;
/// all callers must be on the same thread.
#[derive(Debug)]
pub struct Upstream {
    /// The kind of the server, in errors and logs.
    peer: &'static str,
    socket: PathBuf,
    connect_timeout: Duration,
    state: Mutex<UpstreamState>,
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct UpstreamState {
    current: Option<SendRequest>,
    generation: u64,
    /// The last attempt to connect failed, and was logged.
    is_down: bool,
    /// Tasks that drive connections; the last task drives the current connection.
    drivers: VecDeque<AbortOnDropHandle<()>>,
}

/// An open call.
#[derive(Debug)]
pub struct UpstreamCall {
    /// The response. Dropping it and the stream cancels the call.
    pub response: ResponseFuture,
    /// The rest of the request's body.
    pub stream: SendStream,
}

impl Upstream {
    /// Creates an upstream for a container runtime's socket. The first call connects to it.
    pub fn new(socket: PathBuf, connect_timeout: Duration) -> Self {
        Self::of("container runtime", socket, connect_timeout)
    }

    /// Creates an upstream for another CRI server. Errors and logs call it `peer`.
    pub fn of(peer: &'static str, socket: PathBuf, connect_timeout: Duration) -> Self {
        Self {
            peer,
            socket,
            connect_timeout,
            state: Mutex::default(),
            connecting: tokio::sync::Mutex::new(()),
        }
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the error of a call whose connection was lost.
    pub fn connection_lost(&self, source: Error) -> Unavailable {
        Unavailable::Lost { peer: self.peer, socket: self.socket.clone(), source }
    }

    /// Sends a request's head and the first part of its body, or the whole body with
    /// `end_of_stream`. Opens a new connection if the current one does not accept the request.
    pub async fn send(
        &self,
        head: &Parts,
        body: &Bytes,
        end_of_stream: bool,
    ) -> Result<UpstreamCall, Unavailable> {
        let mut may_retry = true;
        loop {
            let (generation, current) = match self.current() {
                Some(current) => current,
                None => self.connect().await?,
            };
            match current.send_request(head, body, end_of_stream) {
                Ok((response, stream)) => return Ok(UpstreamCall { response, stream }),
                // Nothing of the call was sent.
                Err(error) => {
                    self.retire(generation);
                    if !std::mem::take(&mut may_retry) {
                        return Err(self.connection_lost(error));
                    }
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, UpstreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<(u64, SendRequest)> {
        let state = self.state();
        let current = state.current.clone()?;
        state
            .drivers
            .back()
            .is_some_and(|driver| !driver.is_finished())
            .then_some((state.generation, current))
    }

    /// Keeps new calls off a connection. Open calls go on.
    fn retire(&self, generation: u64) {
        let mut state = self.state();
        if state.generation == generation {
            state.current = None;
        }
    }

    async fn connect(&self) -> Result<(u64, SendRequest), Unavailable> {
        let timed_out = || Unavailable::ConnectTimeout {
            peer: self.peer,
            socket: self.socket.clone(),
            after: self.connect_timeout,
        };
        let connected = timeout(self.connect_timeout, self.connect_or_join())
            .await
            .unwrap_or_else(|_| Err(timed_out()));
        let was_down = std::mem::replace(&mut self.state().is_down, connected.is_err());
        let peer = self.peer;
        // Logged once per outage, because a kubelet calls several times a second.
        match &connected {
            Err(error) if !was_down => {
                tracing::warn!(
                    error = error as &dyn std::error::Error,
                    "{peer} unavailable, calls to it fail"
                )
            }
            Ok(_) if was_down => {
                tracing::info!(socket = %self.socket.display(), "{peer} available again")
            }
            _ => {}
        }
        connected
    }

    /// Connects, or joins the attempt of another call.
    async fn connect_or_join(&self) -> Result<(u64, SendRequest), Unavailable> {
        let _one_at_a_time = self.connecting.lock().await;
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let (requests, connection) = connect::open(&self.socket).await.map_err(|error| {
            let (peer, socket) = (self.peer, self.socket.clone());
            Unavailable::Connect { peer, socket, source: Arc::new(error) }
        })?;
        let (peer, socket) = (self.peer, self.socket.clone());
        tracing::debug!(socket = %socket.display(), "connected to the {peer}");
        let driver = tokio::spawn(async move {
            match connection.await {
                Ok(()) => {
                    tracing::debug!(
                        socket = %socket.display(),
                        "{peer} closed the connection"
                    )
                }
                Err(error) => {
                    tracing::info!(
                        socket = %socket.display(),
                        %error,
                        "connection to the {peer} lost"
                    )
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
        state.current = Some(requests.clone());
        Ok((state.generation, requests))
    }
}
