//! Dials the gateway, and serves its calls on the connection.

use std::{
    error::Error,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use http::Request;
use kiyot_link::http2::{self, Profile};
use kiyot_proto::cell::ConnectionKind;
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;

use super::{
    CONNECT_TIMEOUT, ConnectionInfo, Serve, Uplink, control,
    dial::{DialError, Dialler},
};

/// Dials connections with the current certificate, and serves them.
pub(super) struct Connector<'a, F> {
    pub(super) uplink: &'a Uplink,
    pub(super) dialler: Mutex<Arc<Dialler>>,
    pub(super) generations: &'a AtomicU64,
    pub(super) service: &'a F,
    pub(super) end: &'a CancellationToken,
    pub(super) tasks: &'a TaskTracker,
}

/// Outcome of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// The gateway called at least once before the connection ended.
    Accepted,
    /// The connection ended without a call, or no call came within [`CONNECT_TIMEOUT`]: the gateway
    /// rejected it.
    Rejected,
}

impl<S: Serve, F: Fn(ConnectionInfo) -> S + Send + Sync> Connector<'_, F> {
    /// Dials a connection and serves it until it ends. Calls `on_accepted` at the gateway's first
    /// call.
    pub(super) async fn serve(
        &self,
        kind: ConnectionKind,
        on_accepted: impl FnOnce() + Send,
    ) -> Result<Served, DialError> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let dialler = self.dialler.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let stream = timeout(CONNECT_TIMEOUT, dialler.dial(kind))
            .await
            .map_err(|_| DialError::Timeout(CONNECT_TIMEOUT))??;
        let first = CancellationToken::new();
        let service = (self.service)(ConnectionInfo {
            kind,
            generation,
            incarnation: self.uplink.incarnation.clone(),
        });
        // Stops the server when this future is dropped.
        let end = self.end.child_token();
        let _cut = end.clone().drop_guard();
        let mut served: Pin<Box<dyn Future<Output = Result<(), String>> + Send>> =
            if kind == ConnectionKind::Bulk {
                let service = FirstCallMarker { service, first: first.clone() };
                let served = http2::serve(stream, Profile::BULK, service, end, self.tasks.clone());
                Box::pin(async move { served.await.map_err(|error| error.to_string()) })
            } else {
                let first = first.clone();
                let served = control::serve(stream, service, move || first.cancel());
                Box::pin(async move { served.await.map_err(|error| error.to_string()) })
            };
        tokio::select! {
            biased;
            () = first.cancelled() => {}
            result = &mut served => {
                tracing::debug!(
                    ?kind,
                    generation,
                    ?result,
                    "connection closed before the gateway's first call"
                );
                return Ok(if first.is_cancelled() { Served::Accepted } else { Served::Rejected });
            }
            () = tokio::time::sleep(CONNECT_TIMEOUT) => return Ok(Served::Rejected),
        }
        on_accepted();
        tracing::debug!(?kind, generation, "connection accepted by the gateway");
        let result = served.await;
        tracing::debug!(?kind, generation, ?result, "connection closed");
        Ok(Served::Accepted)
    }
}

impl<F> Connector<'_, F> {
    /// Renews the certificate for later connections, which use the current certificate if the
    /// renewal fails. Open connections stay open.
    pub(super) async fn renew(&self) {
        tracing::info!("renewing certificate");
        if let Err(error) = self.uplink.enrol(self.end, self.tasks).await {
            // A new certificate that can't be stored is used nevertheless.
            tracing::warn!(error = &error as &dyn Error, "certificate not renewed, or not stored");
        }
        match self.uplink.dialler() {
            Ok(Some(dialler)) => {
                *self.dialler.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(dialler);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(error = &error as &dyn Error, "certificate unusable");
            }
        }
    }
}

/// Cancels `first` at the first call.
#[derive(Clone)]
struct FirstCallMarker<S> {
    service: S,
    first: CancellationToken,
}

impl<S: Serve> tower::Service<Request<Body>> for FirstCallMarker<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if !self.first.is_cancelled() {
            self.first.cancel();
        }
        self.service.call(request)
    }
}
