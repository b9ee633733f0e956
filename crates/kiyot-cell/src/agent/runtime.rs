//! The cell's containerd: calls to it over its socket, CRI and its own API.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use kiyot_proto::cri::{image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient};
use tokio::net::UnixStream;
use tonic::{
    Request,
    metadata::MetadataValue,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

/// The most that a message of CRI may have, in bytes: as in containerd and the kubelet.
pub const MESSAGE_LIMIT: usize = 16 * 1024 * 1024;
/// How long a call waits for a containerd that is just being started.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// The wait between two tries.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
/// The deadline of a call that only asks.
pub const ASK: Duration = Duration::from_secs(10);
/// containerd's namespace for CRI.
pub const NAMESPACE: &str = "k8s.io";

/// The cell's containerd. Cheap to clone; connects when it is used, and again when the connection is lost.
#[derive(Debug, Clone)]
pub struct Runtime {
    channel: Channel,
}

impl Runtime {
    /// For the containerd behind a socket.
    pub fn new(socket: PathBuf) -> Self {
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move {
                let until = Instant::now() + CONNECT_PATIENCE;
                loop {
                    match UnixStream::connect(&socket).await {
                        Ok(stream) => return Ok(TokioIo::new(stream)),
                        Err(error) if Instant::now() >= until => return Err(error),
                        Err(_) => tokio::time::sleep(CONNECT_PAUSE).await,
                    }
                }
            }
        }));
        Self { channel }
    }

    /// The connection.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// CRI's runtime service.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel()).max_decoding_message_size(MESSAGE_LIMIT).max_encoding_message_size(MESSAGE_LIMIT)
    }

    /// CRI's image service.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel()).max_decoding_message_size(MESSAGE_LIMIT).max_encoding_message_size(MESSAGE_LIMIT)
    }
}

/// A request with a deadline.
pub fn within<T>(deadline: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// A request to containerd's own API, in CRI's namespace.
pub fn namespaced<T>(mut request: Request<T>) -> Request<T> {
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}
