//! The bulk connection, which is linked when the gateway asks for one.

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

/// A bulk_trigger that comes this soon after a connection was linked was meant for that one.
const REUSE_WINDOW: Duration = Duration::from_secs(5);

/// The gateway's bulk_trigger for a bulk connection. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct BulkTrigger(Arc<Notify>);

impl BulkTrigger {
    /// Wishes one more time; wishes that nobody has seen yet are one.
    pub(super) fn request(&self) {
        self.0.notify_one();
    }
}

type Running<'a> = Pin<Box<dyn Future<Output = Result<Served, DialError>> + Send + 'a>>;

/// Makes a connection for each bulk_trigger, and serves it until it ends. A newer one replaces it.
pub(super) async fn run<S: Serve>(
    bulk_trigger: &BulkTrigger,
    connector: &Connector<'_, impl Fn(ConnectionInfo) -> S + Send + Sync>,
) -> Infallible {
    // `None` until the gateway has on_accepted over the current one.
    let used = Mutex::new(None::<Instant>);
    let mut running: Option<Running<'_>> = None;
    loop {
        tokio::select! {
            () = bulk_trigger.0.notified() => {
                let used_since = *used.lock().unwrap_or_else(PoisonError::into_inner);
                let wanted = match (&running, used_since) {
                    (None, _) => true,
                    // It is being linked: that has an end of its own.
                    (Some(_), None) => false,
                    (Some(_), Some(since)) => since.elapsed() > REUSE_WINDOW,
                };
                if wanted {
                    *used.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    let used = &used;
                    let on_accepted = move || *used.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                    // The gateway has no use for the one before, or it would not ask.
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
                    Ok(served) => tracing::debug!(?served, "The bulk connection ended."),
                    Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "The bulk connection could not be linked."),
                }
            }
        }
    }
}
