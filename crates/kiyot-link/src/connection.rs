//! One connection that calls can be made over.

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
    held::Held,
    http2::{self, Owned, Profile},
    watched::Watched,
};

/// One connection that calls can be made over, until it ends. Cheap to clone.
#[derive(Clone)]
pub struct Connection(Arc<Inner>);

struct Inner {
    sender: SendRequest<Body>,
    end: CancellationToken,
    calls: Watched<Calls>,
}

/// The calls that run over a connection.
#[derive(Debug)]
struct Calls {
    open: usize,
    /// When the last one ended.
    idle_since: Instant,
    /// No other may begin.
    over: bool,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

impl Held for Connection {
    /// Calls over it fail.
    fn cut(&self) {
        self.0.end.cancel();
    }

    fn has_ended(&self) -> bool {
        self.0.end.is_cancelled()
            || self.0.sender.is_closed()
            || self.0.calls.with(|calls| calls.over)
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Connection {
    /// Begins HTTP/2 as its client. It is driven by tasks of `tasks` until it ends, `end` is
    /// cancelled, or [`Held::cut`].
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
        let owner = Owned { end: end.clone(), tasks: tasks.clone() };
        let all = end.clone().drop_guard();
        let (sender, driver) =
            http2::client(profile, owner).handshake::<_, Body>(TokioIo::new(io)).await?;
        let token = end.clone();
        // Boxed as in `Owned`.
        let driver = Box::pin(driver);
        tasks.spawn(async move {
            let _all = all;
            if let Some(Err(error)) = token.run_until_cancelled(driver).await {
                tracing::debug!(%error, "a connection of the link broke");
            }
        });
        Ok(Self(Arc::new(Inner {
            sender,
            end,
            calls: Watched::new(Calls { open: 0, idle_since: Instant::now(), over: false }),
        })))
    }

    /// Returns when it has ended.
    pub async fn ended(&self) {
        self.0.end.cancelled().await;
    }

    /// Returns when no call has run over it for this long. From then on none begins: it counts as
    /// ended.
    pub async fn run_out(&self, long: Duration) {
        loop {
            let idle_since =
                self.0.calls.wait_for(|calls| (calls.open == 0).then_some(calls.idle_since)).await;
            let over = |calls: &mut Calls| {
                calls.over = calls.open == 0 && calls.idle_since + long <= Instant::now();
                calls.over
            };
            if self.0.calls.with(over) {
                return;
            }
            tokio::time::sleep_until(idle_since + long).await;
        }
    }

    pub(crate) fn sender(&self) -> SendRequest<Body> {
        self.0.sender.clone()
    }

    /// Counts a call for as long as what it returns lives; `None` when none may begin any more.
    pub(crate) fn begin(&self) -> Option<OpenCall> {
        // Nobody waits for this.
        self.0
            .calls
            .with(|calls| {
                calls.open += usize::from(!calls.over);
                !calls.over
            })
            .then(|| OpenCall(self.clone()))
    }
}

/// A call that runs over a connection.
#[derive(Debug)]
pub(crate) struct OpenCall(Connection);

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0
            .0
            .calls
            .change(|calls| (calls.open, calls.idle_since) = (calls.open - 1, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L12.
    #[tokio::test]
    async fn an_open_call_keeps_it_however_short_it_may_be_idle() {
        for long in [Duration::ZERO, Duration::from_millis(50)] {
            // Nobody need answer for this side to begin.
            let (near, _far) = tokio::io::duplex(1 << 16);
            let connection = Connection::open(
                near,
                Profile::BULK,
                &CancellationToken::new(),
                &TaskTracker::new(),
            )
            .await
            .unwrap();
            let (one, other) = (connection.begin().unwrap(), connection.begin().unwrap());
            drop(one);
            assert!(
                tokio::time::timeout(Duration::from_millis(200), connection.run_out(long))
                    .await
                    .is_err(),
                "a call is open"
            );
            assert!(!connection.has_ended());
            drop(other);
            let ended = Instant::now();
            connection.run_out(long).await;
            assert!(ended.elapsed() >= long);
            assert!(connection.has_ended() && connection.begin().is_none(), "a call would be cut");
        }
    }
}
