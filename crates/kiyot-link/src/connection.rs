//! The calling side of an HTTP/2 connection.

use std::{fmt, sync::Arc, time::Duration};

use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;

use crate::{
    http2::{self, Profile, TrackedExecutor},
    link_connection::LinkConnection,
    watch::Watch,
};

/// An HTTP/2 connection, seen from its client. Cheap to clone.
#[derive(Clone)]
pub struct Connection(Arc<Inner>);

struct Inner {
    sender: SendRequest<Body>,
    end: CancellationToken,
    calls: Watch<Calls>,
}

/// The state of a connection's calls.
#[derive(Debug)]
struct Calls {
    open: usize,
    /// The time at which the last call ended.
    idle_since: Instant,
    /// Set by the idle timeout: no further call may start.
    closed: bool,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

impl LinkConnection for Connection {
    /// Ends the connection; its calls fail.
    fn abort(&self) {
        self.0.end.cancel();
    }

    fn has_ended(&self) -> bool {
        self.0.end.is_cancelled()
            || self.0.sender.is_closed()
            || self.0.calls.with(|calls| calls.closed)
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Connection {
    /// Performs the HTTP/2 handshake as the client. Tasks of `tasks` drive the connection until it
    /// ends, `end` is cancelled, or it is aborted.
    pub async fn open<I>(
        io: I,
        profile: Profile,
        end: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Result<Self, hyper::Error>
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let end = end.child_token();
        let executor = TrackedExecutor { end: end.clone(), tasks: tasks.clone() };
        let guard = end.clone().drop_guard();
        let (sender, driver) =
            http2::client(profile, executor).handshake::<_, Body>(TokioIo::new(io)).await?;
        let token = end.clone();
        // Boxed as in `TrackedExecutor`.
        let driver = Box::pin(driver);
        tasks.spawn(async move {
            let _guard = guard;
            if let Some(Err(error)) = token.run_until_cancelled(driver).await {
                tracing::debug!(%error, "connection of the link failed");
            }
        });
        Ok(Self(Arc::new(Inner {
            sender,
            end,
            calls: Watch::new(Calls { open: 0, idle_since: Instant::now(), closed: false }),
        })))
    }

    /// Waits until the connection has ended.
    pub async fn ended(&self) {
        self.0.end.cancelled().await;
    }

    /// Waits until no call has been open for `idle_timeout`, and closes the connection for further
    /// calls.
    pub async fn close_when_idle(&self, idle_timeout: Duration) {
        loop {
            let idle_since =
                self.0.calls.wait_for(|calls| (calls.open == 0).then_some(calls.idle_since)).await;
            let close = |calls: &mut Calls| {
                calls.closed = calls.open == 0 && calls.idle_since + idle_timeout <= Instant::now();
                calls.closed
            };
            if self.0.calls.with(close) {
                return;
            }
            tokio::time::sleep_until(idle_since + idle_timeout).await;
        }
    }

    pub(crate) fn sender(&self) -> SendRequest<Body> {
        self.0.sender.clone()
    }

    /// Counts a call as open until the guard is dropped. Returns `None` if the connection is closed
    /// for calls.
    pub(crate) fn start_call(&self) -> Option<OpenCall> {
        // No wake-up: no task waits for more open calls.
        self.0
            .calls
            .with(|calls| {
                calls.open += usize::from(!calls.closed);
                !calls.closed
            })
            .then(|| OpenCall(self.clone()))
    }
}

/// A guard that counts a call of a connection.
#[derive(Debug)]
pub(crate) struct OpenCall(Connection);

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0
            .0
            .calls
            .modify(|calls| (calls.open, calls.idle_since) = (calls.open - 1, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L12.
    #[tokio::test]
    async fn open_call_keeps_its_connection_whatever_the_idle_timeout() {
        for idle_timeout in [Duration::ZERO, Duration::from_millis(50)] {
            // The client's handshake needs no answer.
            let (near, _far) = tokio::io::duplex(1 << 16);
            let connection = Connection::open(
                near,
                Profile::BULK,
                &CancellationToken::new(),
                &TaskTracker::new(),
            )
            .await
            .unwrap();
            let (first, second) =
                (connection.start_call().unwrap(), connection.start_call().unwrap());
            drop(first);
            assert!(
                tokio::time::timeout(
                    Duration::from_millis(200),
                    connection.close_when_idle(idle_timeout)
                )
                .await
                .is_err(),
                "a call is open"
            );
            assert!(!connection.has_ended());
            let ended = Instant::now();
            drop(second);
            connection.close_when_idle(idle_timeout).await;
            assert!(ended.elapsed() >= idle_timeout);
            assert!(connection.has_ended() && connection.start_call().is_none());
        }
    }
}
