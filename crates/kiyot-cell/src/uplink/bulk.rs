//! Bulk connection, dialled at the gateway's request.

use std::{
    convert::Infallible,
    future::pending,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kiyot_proto::cell::ConnectionKind;
use tokio::{sync::Notify, time::Instant};

use super::{
    ConnectionInfo, MAX_REJECTIONS, Serve,
    connector::{Connector, Served},
    dial::DialError,
};

/// Longest age of a connection at which a request is treated as a request for this connection.
const REUSE_WINDOW: Duration = Duration::from_secs(5);

/// Signals requests for a bulk connection. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct BulkTrigger(Arc<Notify>);

impl BulkTrigger {
    /// Requests a connection. Pending requests are merged.
    pub(super) fn request(&self) {
        self.0.notify_one();
    }
}

type Running<'a> = Pin<Box<dyn Future<Output = Result<Served, DialError>> + Send + 'a>>;

/// Outcomes of the bulk connections so far.
#[derive(Debug, Default)]
struct History {
    /// `None` until the gateway has called over the current connection.
    accepted_at: Option<Instant>,
    /// Consecutive rejected connections since the last renewal, if any.
    rejections: u32,
    /// True from a renewal until the gateway accepts a connection.
    is_renewed: bool,
}

impl History {
    fn accepted(&mut self) {
        *self = Self { accepted_at: Some(Instant::now()), ..Self::default() };
    }

    /// Counts a rejected connection. Returns whether the certificate must be renewed.
    ///
    /// The gateway gives no reason, and decides by its own clock. A certificate that it has
    /// accepted before has most probably expired. If it rejects a new certificate too, expiry is
    /// not the reason.
    fn rejected(&mut self) -> bool {
        self.rejections += 1;
        let renews = !self.is_renewed || self.rejections >= MAX_REJECTIONS;
        if renews {
            (self.rejections, self.is_renewed) = (0, true);
        }
        renews
    }
}

/// Dials and serves a connection per request. A new connection replaces the current one. After a
/// rejection the certificate is renewed, and the connection is dialled again.
pub(super) async fn run<S: Serve>(
    bulk_trigger: &BulkTrigger,
    connector: &Connector<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
) -> Infallible {
    let history = Mutex::new(History::default());
    let history = || history.lock().unwrap_or_else(PoisonError::into_inner);
    let dial = |renews: bool| -> Running<'_> {
        history().accepted_at = None;
        Box::pin(async move {
            if renews {
                connector.renew().await;
            }
            connector.serve(ConnectionKind::Bulk, move || history().accepted()).await
        })
    };
    let mut running: Option<Running<'_>> = None;
    loop {
        tokio::select! {
            () = bulk_trigger.0.notified() => {
                let since = history().accepted_at;
                let wanted = match (&running, since) {
                    (None, _) => true,
                    // The attempt in progress has a timeout.
                    (Some(_), None) => false,
                    (Some(_), Some(since)) => since.elapsed() > REUSE_WINDOW,
                };
                if wanted {
                    // A request for another connection means that the gateway has given up the
                    // current one.
                    running = Some(dial(false));
                }
            }
            result = async {
                match &mut running {
                    Some(running) => running.await,
                    None => pending().await,
                }
            } => {
                running = None;
                match result {
                    Ok(Served::Accepted) => tracing::debug!("bulk connection closed"),
                    Ok(Served::Rejected) => {
                        tracing::warn!("bulk connection rejected by the gateway");
                        if history().rejected() {
                            running = Some(dial(true));
                        }
                    }
                    Err(error) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "bulk connection failed"
                    ),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies L29.
    #[test]
    fn first_rejection_renews_the_certificate_and_later_rejections_rarely_do() {
        let mut history = History::default();
        for _ in 0..2 {
            assert!(history.rejected(), "the certificate may have expired");
            for _ in 0..3 {
                let renewals = (0..MAX_REJECTIONS).filter(|_| history.rejected()).count();
                assert_eq!(renewals, 1, "a new certificate has not expired");
            }
            history.accepted();
            assert!(history.accepted_at.is_some());
        }
    }
}
