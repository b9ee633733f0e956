//! Checks of the daemon's health, for `/healthz` and `/readyz`.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, header};
use tokio::time::timeout;

use crate::{
    backends::{
        Method,
        cri::{UnaryError, Upstream},
    },
    error_chain::error_chain,
    proxy::Watchdog,
};

/// Time limit of a check. Prometheus and a kubelet's probe wait for longer by default.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// An encoded VersionRequest, which has no fields, with its frame header.
const VERSION_REQUEST: &[u8] = &[0; 5];
const GRPC_STATUS: &str = "grpc-status";
/// The kind of the server that is checked, in errors and logs.
const OWN_SOCKET: &str = "daemon's own CRI socket";

/// The checks.
#[derive(Debug)]
pub(super) struct Health {
    watchdog: Watchdog,
    /// The daemon's own CRI socket.
    socket: Upstream,
}

/// A reason for which a check fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unhealthy {
    #[error("thread of the CRI socket did not respond within {0:?}")]
    Stuck(Duration),
    #[error("CRI socket did not answer Version within {0:?}")]
    Slow(Duration),
    #[error("CRI socket failed: {0}")]
    Failed(String),
    #[error("call of Version failed with the code {0} of gRPC; allowed: 0")]
    Refused(String),
}

impl Health {
    pub(super) fn new(watchdog: Watchdog, socket: PathBuf) -> Self {
        Self { watchdog, socket: Upstream::of(OWN_SOCKET, socket, CHECK_TIMEOUT) }
    }

    /// Checks that the thread of the CRI socket makes progress, as for systemd's watchdog.
    pub(super) async fn alive(&self) -> Result<(), Unhealthy> {
        let pinged = timeout(CHECK_TIMEOUT, self.watchdog.ping()).await;
        pinged.map_err(|_| Unhealthy::Stuck(CHECK_TIMEOUT))
    }

    /// Checks that the CRI socket answers Version, which the node backend answers.
    pub(super) async fn ready(&self) -> Result<(), Unhealthy> {
        answers_version(&self.socket).await
    }
}

/// Checks that a server of CRI answers Version.
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
    use super::*;

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
