//! Calls to the daemon: connection, deadlines, and the errors that users can act on.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::{StreamExt, stream, stream::BoxStream};
use hyper_util::rt::TokioIo;
use kiyot_proto::admin::{self, admin_client::AdminClient};
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Code, Response, Status, Streaming,
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use crate::error::Error;

/// Bounds the connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Bounds a call, and the wait for the next part of a list. The daemon's own limits are lower.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Bounds the end of a cell.
pub(crate) const END_TIMEOUT: Duration = Duration::from_secs(150);
/// Bounds a response.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// A connection to the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    admin: AdminClient<Channel>,
}

impl Client {
    /// Connects to the socket of a daemon.
    pub(crate) async fn connect(socket: &Path) -> Result<Self, Error> {
        let unreachable =
            |cause: String| Error::Unreachable { socket: socket.display().to_string(), cause };
        // Dials first to get the cause of a failure, which tonic hides.
        let dialled = timeout(CONNECT_TIMEOUT, UnixStream::connect(socket)).await;
        match dialled {
            Ok(Ok(_)) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Error::Closed { socket: socket.display().to_string() });
            }
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Err(_) => return Err(unreachable("timeout".to_owned())),
        }
        let path: PathBuf = socket.to_owned();
        let connector = service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| unreachable(error.to_string()))?;
        let admin = AdminClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
        Ok(Self { admin })
    }

    /// Returns the version of the daemon.
    pub(crate) async fn version(&self) -> Result<admin::VersionResponse, Error> {
        let mut admin = self.admin.clone();
        let call = async move { admin.version(admin::VersionRequest {}).await };
        within(CALL_TIMEOUT, call).await?.map(Response::into_inner).map_err(|status| {
            match status.code() {
                Code::Unimplemented => Error::without_method(None),
                _ => Error::Daemon(status),
            }
        })
    }

    /// Makes a call with a single response.
    pub(crate) async fn call<T>(
        &self,
        call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        self.call_within(CALL_TIMEOUT, call).await
    }

    /// Makes a call with a single response and a limit of its own.
    pub(crate) async fn call_within<T>(
        &self,
        limit: Duration,
        call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, Error> {
        match within(limit, call(self.admin.clone())).await? {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => Err(self.explained(status).await),
        }
    }

    /// Makes a call with a stream of responses, each within the limit of a call.
    pub(crate) async fn list<T: Send + 'static>(
        &self,
        call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<BoxStream<'static, Result<T, Error>>, Error> {
        let parts = self.call(call).await?;
        let next = |mut parts: Streaming<T>| async move {
            let next = match within(CALL_TIMEOUT, parts.next()).await {
                Ok(next) => next?.map_err(Error::Daemon),
                Err(error) => Err(error),
            };
            Some((next, parts))
        };
        Ok(stream::unfold(parts, next).boxed())
    }

    /// Makes a call with a stream of responses that may come at any time.
    pub(crate) async fn follow<T: Send + 'static>(
        &self,
        call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<BoxStream<'static, Result<T, Error>>, Error> {
        let parts = self.call(call).await?;
        Ok(parts.map(|part| part.map_err(Error::Daemon)).boxed())
    }

    /// Returns the error of a status. If the daemon lacks the method, requests its version.
    async fn explained(&self, status: Status) -> Error {
        if status.code() != Code::Unimplemented {
            return Error::Daemon(status);
        }
        match self.version().await {
            Ok(daemon) => Error::without_method(Some(&daemon)),
            Err(error @ Error::OtherVersion { .. }) => error,
            Err(_) => Error::Daemon(status),
        }
    }
}

async fn within<T>(limit: Duration, call: impl Future<Output = T>) -> Result<T, Error> {
    timeout(limit, call).await.map_err(|_| Error::TooSlow(limit.as_secs()))
}
