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
    ConnectionInfo, Serve,
    connector::{Connector, Served},
    dial::DialError,
};

/// Age of a connection up to which a request is taken as meant for it.
const REUSE_WINDOW: Duration = Duration::from_secs(5);

/// Signals requests for a bulk connection. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct BulkTrigger(Arc<Notify>);

impl BulkTrigger {
    /// Requests a connection. Requests that are not handled yet are merged.
    pub(super) fn request(&self) {
        self.0.notify_one();
    }
}

type Running<'a> = Pin<Box<dyn Future<Output = Result<Served, DialError>> + Send + 'a>>;

/// Dials and serves a connection per request. A new connection replaces the current one.
pub(super) async fn run<S: Serve>(
    bulk_trigger: &BulkTrigger,
    connector: &Connector<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
) -> Infallible {
    // `None` until the gateway has called over the current connection.
    let accepted_at = Mutex::new(None::<Instant>);
    let mut running: Option<Running<'_>> = None;
    loop {
        tokio::select! {
            () = bulk_trigger.0.notified() => {
                let since = *accepted_at.lock().unwrap_or_else(PoisonError::into_inner);
                let wanted = match (&running, since) {
                    (None, _) => true,
                    // The attempt in progress has a timeout.
                    (Some(_), None) => false,
                    (Some(_), Some(since)) => since.elapsed() > REUSE_WINDOW,
                };
                if wanted {
                    *accepted_at.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    let accepted_at = &accepted_at;
                    let on_accepted = move || {
                        *accepted_at.lock().unwrap_or_else(PoisonError::into_inner) =
                            Some(Instant::now());
                    };
                    // A request for another connection means that the gateway has given up the
                    // current one.
                    running = Some(Box::pin(connector.serve(ConnectionKind::Bulk, on_accepted)));
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
                    Ok(served) => tracing::debug!(?served, "bulk connection closed"),
                    Err(error) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "bulk connection failed"
                    ),
                }
            }
        }
    }
}
