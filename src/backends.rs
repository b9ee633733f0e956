//! What answers for a pod: the node's own container runtime, or cells.

use std::{fmt, sync::Arc, time::Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use tonic::Status;

pub mod cri;
pub mod method;
pub mod milpa;
pub mod registry;

pub use method::Method;

/// A backend's name: the key of its table in the configuration.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendName(Arc<str>);

impl BackendName {
    /// A name as the configuration has it. The configuration has checked its form.
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// What a backend calls its own at `RunPodSandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Declared {
    /// Values of the annotation `kubernetes.io/target-runtime`.
    pub target_runtimes: &'static [&'static str],
    /// Runtime handlers (`RunPodSandboxRequest.runtime_handler`).
    pub runtime_handlers: &'static [&'static str],
}

/// What pods of a backend may ask for that not each runtime does, as far as is known: the
/// `RuntimeHandlerFeatures` of its handlers. A kubelet refuses a pod that asks its handler for
/// more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// A mount that is read-only with all that is mounted beneath it.
    pub recursive_read_only_mounts: bool,
    /// Pods of its handlers may be left to the node ([`Decoded::leaves_to_node`]), and then have
    /// what the node's default handler does.
    pub may_be_on_node: bool,
}

/// A backend. Object-safe and small: it hands out an upstream for raw forwarding, or answers
/// decoded calls.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Its name.
    fn name(&self) -> &BackendName;
    /// What it calls its own.
    fn declares(&self) -> Declared;
    /// How calls reach it.
    fn path(&self) -> CallPath<'_>;
}

/// How calls reach a backend.
#[derive(Debug)]
pub enum CallPath<'a> {
    /// As bytes, to the socket of a container runtime.
    Raw(&'a cri::Upstream),
    /// As messages.
    Decoded(&'a Arc<dyn Decoded>),
}

/// A backend that answers decoded calls. Messages are protobuf without the gRPC frame.
#[async_trait]
pub trait Decoded: fmt::Debug + Send + Sync + 'static {
    /// Whether an id, or a prefix of one as crictl sends them, is this backend's. Never looks
    /// anything up.
    fn owns(&self, id: &str) -> bool;

    /// Answers at once from memory, on the caller's thread, without waiting; `None` if this method
    /// takes a [`Self::call`].
    ///
    /// For a list, the answer is this backend's part of it: an encoded answer whose repeated field
    /// is appended to the others'.
    fn snapshot(&self, method: Method, message: &[u8]) -> Option<Result<Bytes, Status>>;

    /// Why a pod that is routed to this backend runs on the node instead, as the end of the
    /// sentence "it ..."; `None` if it does not. From memory, of an encoded `RunPodSandboxRequest`.
    fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        let _ = message;
        None
    }

    /// What its pods may ask for, from memory. None of them may ask for a user namespace of its
    /// own.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Whether an image call is for a pod of this backend, from memory: `PullImage` with the uid of
    /// one of its pods, `ImageStatus` with the annotations of one.
    fn claims_image(&self, method: Method, message: &[u8]) -> bool;

    /// What its pods' images are known to be, for an `ImageStatus` that names no pod and that the
    /// node answers with no image: an encoded `ImageStatusResponse`.
    fn reported_image(&self, reference: &str) -> Option<Bytes>;

    /// Answers, from memory, an `ImageStatus` that none claims, but that has the annotations of
    /// pods of this backend up to those that a kubelet changes when it is restarted: an encoded
    /// `ImageStatusResponse`, `None` if it is not certain which image they would have.
    fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        let _ = message;
        None
    }

    /// What happens to its pods from now on: encoded `ContainerEventResponse`s. How many wait for a
    /// reader is limited; instead of losing one it ends with an error. Dropping it ends it.
    fn events(&self) -> BoxStream<'static, Result<Bytes, Status>>;

    /// Answers one call, until `deadline` (the caller's `grpc-timeout`). Dropping the future does
    /// not undo what has begun.
    ///
    /// `ListPodSandboxMetrics` comes here always. Its request has no fields: `message` is the
    /// node's encoded `ListMetricDescriptorsResponse`, and only those metrics are answered that the
    /// node describes, with the labels that it describes.
    async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status>;
}
