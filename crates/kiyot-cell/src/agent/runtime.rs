//! Client of the cell's containerd: CRI and containerd's own API.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicI64},
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use kiyot_proto::cri::{
    StatusRequest, image_service_client::ImageServiceClient,
    runtime_service_client::RuntimeServiceClient,
};
use tokio::net::UnixStream;
use tonic::{
    Code, Request, Status,
    metadata::MetadataValue,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

/// Upper bound on a CRI message, in bytes, as in containerd and the kubelet.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// Longest wait for a containerd that is starting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay between connection attempts.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(10);
/// Delay between connection attempts to a containerd without its CRI plugin. Only a new process can
/// have the plugin.
const NO_CRI_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Error of a containerd whose CRI plugin has failed; it serves its other plugins.
const NO_CRI: &str = "containerd runs without its CRI plugin; its log has the reason";
/// Deadline of calls that only read.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Message of all CRI calls until containerd is initialized (internal/cri, checkInitialized).
/// Before 2.0 this error has no status code of its own.
const NOT_INITIALIZED: &str = "server is not initialized yet";
/// containerd's namespace for CRI.
pub const NAMESPACE: &str = "k8s.io";

/// Client of the cell's containerd. Cheap to clone; connects on use, and reconnects.
#[derive(Debug, Clone)]
pub struct Runtime {
    channel: Channel,
    /// Hour since 1970 for which a lease exists; containerd's metadata lasts as long as the cell.
    pub(super) leased_hour: Arc<AtomicI64>,
}

impl Runtime {
    /// Creates a client for a socket.
    pub fn new(socket: PathBuf) -> Self {
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(
            service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move {
                    let deadline = Instant::now() + CONNECT_TIMEOUT;
                    loop {
                        match connect(&socket).await {
                            Ok(stream) => return Ok(TokioIo::new(stream)),
                            Err(error) if Instant::now() >= deadline => return Err(error),
                            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                                tokio::time::sleep(NO_CRI_RETRY_DELAY).await;
                            }
                            Err(_) => tokio::time::sleep(CONNECT_RETRY_DELAY).await,
                        }
                    }
                }
            }),
        );
        Self { channel, leased_hour: Arc::new(AtomicI64::new(i64::MIN)) }
    }

    /// Returns the channel.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Returns a client of CRI's runtime service.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Returns a client of CRI's image service.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }
}

/// Connects, and waits until containerd's CRI plugin is initialized; containerd serves the socket a
/// moment earlier.
async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket).await?;
    let socket = socket.to_owned();
    let probe = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(probe)
        .await
        .map_err(io::Error::other)?;
    match RuntimeServiceClient::new(channel)
        .status(with_timeout(QUERY_TIMEOUT, StatusRequest::default()))
        .await
    {
        Err(status) if status.message().contains(NOT_INITIALIZED) => {
            Err(io::Error::other(status.message()))
        }
        Err(status) if status.code() == Code::Unimplemented => {
            Err(io::Error::new(io::ErrorKind::Unsupported, NO_CRI))
        }
        // The caller handles other errors.
        _ => Ok(stream),
    }
}

/// Returns a request with a deadline.
pub fn with_timeout<T>(deadline: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// Returns a request to containerd's own API in the namespace of CRI.
pub fn namespaced<T>(mut request: Request<T>) -> Request<T> {
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

/// Returns a request to containerd's own API under a lease, which protects the objects that it
/// creates from garbage collection.
pub(super) fn leased<T>(request: Request<T>, lease: &str) -> Result<Request<T>, Status> {
    let mut request = namespaced(request);
    let lease = MetadataValue::try_from(lease)
        .map_err(|_| Status::internal("lease id is not a valid metadata value"))?;
    request.metadata_mut().insert("containerd-lease", lease);
    Ok(request)
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::{Ready, ready},
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        task::{Context, Poll},
    };

    use http::Response;
    use kiyot_proto::cri::VersionRequest;
    use tokio::net::UnixListener;
    use tonic::{body::Body, server::NamedService, transport::Server};
    use tower::Service;

    use super::*;

    /// Fails calls like a starting containerd at first, then with other errors.
    #[derive(Clone)]
    struct FakeContainerd(Arc<AtomicUsize>);

    impl NamedService for FakeContainerd {
        const NAME: &'static str = "runtime.v1.RuntimeService";
    }

    impl Service<http::Request<Body>> for FakeContainerd {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = Ready<Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            let early = self.0.fetch_add(1, Ordering::SeqCst) < 3;
            let status =
                if early { Status::unknown(NOT_INITIALIZED) } else { Status::aborted("fake") };
            ready(Ok(status.into_http()))
        }
    }

    /// Verifies I7.
    #[tokio::test]
    async fn call_waits_until_containerd_is_initialized() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("containerd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let incoming = futures::stream::unfold(listener, |listener| async {
            Some((listener.accept().await.map(|(stream, _)| stream), listener))
        });
        let server = tokio::spawn(
            Server::builder()
                .add_service(FakeContainerd(Arc::clone(&calls)))
                .serve_with_incoming(incoming),
        );
        let refused =
            Runtime::new(socket).runtime().version(VersionRequest::default()).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::Aborted, "fake"));
        // Three early failures, a successful probe, and the call itself.
        assert_eq!(calls.load(Ordering::SeqCst), 5);
        server.abort();
    }

    /// Verifies I7.
    #[tokio::test]
    async fn containerd_without_its_cri_plugin_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("containerd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let nothing = tonic::service::Routes::default();
        let incoming = futures::stream::unfold(listener, |listener| async {
            Some((listener.accept().await.map(|(stream, _)| stream), listener))
        });
        let server =
            tokio::spawn(Server::builder().add_routes(nothing).serve_with_incoming(incoming));
        let refused = connect(&socket).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert!(refused.to_string().starts_with("containerd runs without its CRI plugin"));
        server.abort();
    }
}
