//! Checks of the daemon's health, for `/healthz` and `/readyz`.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use http::{HeaderMap, HeaderValue, Request, header};
use kiyot_values::error_chain::error_chain;
use tokio::time::timeout;

use crate::{
    backends::{
        Method,
        cri::{UnaryError, Upstream},
    },
    proxy::Watchdog,
};

/// Time limit of a check, shorter than the default timeout of a scrape by Prometheus (10 s).
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Encoded VersionRequest with its frame header. The message has no fields.
const VERSION_REQUEST: &[u8] = &[0; 5];
const GRPC_STATUS: &str = "grpc-status";
/// Name of the checked server in errors and logs.
const OWN_SOCKET: &str = "daemon's own CRI socket";

/// Outcome of a check, for all requests that share the check.
type CheckOutcome = Result<(), Arc<Unhealthy>>;

/// Shares a check between all requests that arrive while it runs, so that a flood of requests makes
/// one call at a time.
#[derive(Debug, Default)]
struct SharedCheck(Mutex<Option<WeakShared<BoxFuture<'static, CheckOutcome>>>>);

#[derive(Debug)]
pub(super) struct Health {
    watchdog: Watchdog,
    /// The daemon's own CRI socket.
    socket: Arc<Upstream>,
    alive: SharedCheck,
    ready: SharedCheck,
}

/// Reason why a check failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unhealthy {
    #[error("thread of the CRI socket did not respond within {0:?}")]
    Stuck(Duration),
    #[error("CRI socket did not answer Version within {0:?}")]
    Slow(Duration),
    #[error("CRI socket failed: {0}")]
    Failed(String),
    #[error("call of Version failed with gRPC code {0}; allowed: 0")]
    Refused(String),
}

impl SharedCheck {
    /// Returns the running check, or begins a new check.
    fn share(
        &self,
        check: impl Future<Output = Result<(), Unhealthy>> + Send + 'static,
    ) -> Shared<BoxFuture<'static, CheckOutcome>> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let joined = running.as_ref().and_then(WeakShared::upgrade);
        if let Some(joined) = joined.filter(|joined| joined.peek().is_none()) {
            return joined;
        }
        let begun = check.map(|outcome| outcome.map_err(Arc::new)).boxed().shared();
        *running = begun.downgrade();
        begun
    }
}

impl Health {
    pub(super) fn new(watchdog: Watchdog, socket: PathBuf) -> Self {
        let socket = Arc::new(Upstream::of(OWN_SOCKET, socket, CHECK_TIMEOUT));
        let (alive, ready) = (SharedCheck::default(), SharedCheck::default());
        Self { watchdog, socket, alive, ready }
    }

    /// Checks that the CRI socket's thread makes progress, by the ping of systemd's watchdog.
    pub(super) async fn alive(&self) -> CheckOutcome {
        let watchdog = self.watchdog.clone();
        let check = async move {
            let pinged = timeout(CHECK_TIMEOUT, watchdog.ping()).await;
            pinged.map_err(|_| Unhealthy::Stuck(CHECK_TIMEOUT))
        };
        self.alive.share(check).await
    }

    /// Checks that the CRI socket answers Version. The response is the node backend's.
    pub(super) async fn ready(&self) -> CheckOutcome {
        let socket = Arc::clone(&self.socket);
        self.ready.share(async move { answers_version(&socket).await }).await
    }
}

async fn answers_version(socket: &Upstream) -> Result<(), Unhealthy> {
    let request = Request::post(format!("http://localhost{}", Method::Version.path()))
        .header(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"))
        .header(header::TE, HeaderValue::from_static("trailers"))
        .body(())
        .map_err(|error| Unhealthy::Failed(error.to_string()))?;
    let (head, ()) = request.into_parts();
    let body = Bytes::from_static(VERSION_REQUEST);
    let answered = timeout(CHECK_TIMEOUT, socket.unary(&head, &body)).await;
    let response = answered.map_err(|_| Unhealthy::Slow(CHECK_TIMEOUT))?;
    let response = response.map_err(|error| {
        Unhealthy::Failed(match error {
            UnaryError::Unavailable(error) => error_chain(&error),
            UnaryError::Reset(reason) => format!("the call was reset: {reason:?}"),
            UnaryError::TooLarge => "the response is too large".to_owned(),
        })
    })?;
    let status = |headers: &HeaderMap| headers.get(GRPC_STATUS).cloned();
    let code = response.trailers.as_ref().and_then(status);
    match code.or_else(|| status(&response.head.headers)) {
        Some(code) if code == "0" => Ok(()),
        code => Err(Unhealthy::Refused(format!("{code:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Verifies O9.
    #[tokio::test]
    async fn requests_during_a_check_share_it_and_a_later_request_begins_the_next_check() {
        let (check, begun) = (SharedCheck::default(), Arc::new(AtomicUsize::new(0)));
        let next = || {
            let begun = Arc::clone(&begun);
            check.share(async move {
                begun.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                Err(Unhealthy::Stuck(CHECK_TIMEOUT))
            })
        };
        let outcomes = futures::future::join_all((0..100).map(|_| next())).await;
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        next().await.unwrap_err();
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }

    /// Verifies O4.
    #[tokio::test]
    async fn socket_that_can_not_be_connected_is_named_with_the_cause() {
        let path = tempfile::tempdir().unwrap().path().join("cri.sock");
        let socket = Upstream::of(OWN_SOCKET, path.clone(), CHECK_TIMEOUT);
        let text = answers_version(&socket).await.unwrap_err().to_string();
        let begin = format!(
            "CRI socket failed: no connection to the daemon's own CRI socket at {}: ",
            path.display()
        );
        assert!(text.starts_with(&begin) && text.contains("No such file"), "{text}");
    }
}
