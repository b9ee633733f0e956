//! Serving calls on a connection that the agent linked.

use std::{
    pin::Pin,
    sync::{
        Arc,
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
    CONNECT_TIMEOUT, ConnectionInfo, Serve, control,
    dial::{DialError, Dialler},
};

/// What all connections of a certificate have in common.
pub(super) struct Connector<'a, F> {
    pub(super) dialler: &'a Dialler,
    pub(super) generations: &'a AtomicU64,
    pub(super) incarnation: &'a Arc<str>,
    pub(super) service: &'a F,
    pub(super) end: &'a CancellationToken,
    pub(super) tasks: &'a TaskTracker,
}

/// How a connection went that was linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// The gateway on_accepted, and later the connection ended.
    Accepted,
    /// It ended without any call, or none came in time: the gateway didn't let it in.
    Rejected,
}

impl<S: Serve, F: Fn(ConnectionInfo) -> S + Send + Sync> Connector<'_, F> {
    /// Makes one connection and serves it until it ends. `on_accepted` is told of the gateway's first
    /// call.
    pub(super) async fn serve(
        &self,
        kind: ConnectionKind,
        on_accepted: impl FnOnce() + Send,
    ) -> Result<Served, DialError> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let stream = timeout(CONNECT_TIMEOUT, self.dialler.dial(kind))
            .await
            .map_err(|_| DialError::Timeout(CONNECT_TIMEOUT))??;
        let first = CancellationToken::new();
        let service = (self.service)(ConnectionInfo {
            kind,
            generation,
            incarnation: self.incarnation.clone(),
        });
        // Cuts what runs when this future is dropped.
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
                tracing::debug!(?kind, generation, ?result, "A connection ended before it was used.");
                return Ok(if first.is_cancelled() { Served::Accepted } else { Served::Rejected });
            }
            () = tokio::time::sleep(CONNECT_TIMEOUT) => return Ok(Served::Rejected),
        }
        on_accepted();
        tracing::debug!(?kind, generation, "The gateway has on_accepted.");
        let result = served.await;
        tracing::debug!(?kind, generation, ?result, "A connection ended.");
        Ok(Served::Accepted)
    }
}

/// Notes the first call.
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
