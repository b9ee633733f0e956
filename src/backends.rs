//! Backends, which answer CRI for pods: container runtimes of the node, and cells.

use std::{fmt, sync::Arc, time::Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use kiyot_engine::request::RuleProviders;
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
    /// Wraps a name, whose form the configuration has checked.
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Returns the name as a string.
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

/// The target runtimes and runtime handlers whose pods a backend runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Declared {
    /// Values of the annotation `kubernetes.io/target-runtime`.
    pub target_runtimes: &'static [&'static str],
    /// Runtime handlers (`RunPodSandboxRequest.runtime_handler`).
    pub runtime_handlers: &'static [&'static str],
}

/// The `RuntimeHandlerFeatures` of a backend's handlers. A kubelet refuses a pod that requests a
/// feature that its handler lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Mounts that are read-only with all mounts beneath them.
    pub recursive_read_only_mounts: bool,
    /// Some pods of the handlers may run on the node ([`DecodedBackend::leaves_to_node`]). They
    /// have the features of the node's default handler.
    pub may_be_on_node: bool,
}

/// A backend: hands out an upstream for raw forwarding, or answers decoded calls.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Returns the backend's name.
    fn name(&self) -> &BackendName;
    /// Returns the target runtimes and handlers whose pods the backend runs.
    fn declares(&self) -> Declared;
    /// Returns how calls reach the backend.
    fn path(&self) -> CallPath<'_>;
}

/// The form in which calls reach a backend.
#[derive(Debug)]
pub enum CallPath<'a> {
    /// Bytes, forwarded to the socket of a container runtime.
    Raw(&'a cri::Upstream),
    /// Decoded messages.
    Decoded(&'a Arc<dyn DecodedBackend>),
}

/// A backend that answers decoded calls. Messages are protobuf without the gRPC frame header.
#[async_trait]
pub trait DecodedBackend: fmt::Debug + Send + Sync + 'static {
    /// Returns whether an id, or a prefix as crictl sends it, belongs to this backend. Only the
    /// form of the id decides.
    fn owns(&self, id: &str) -> bool;

    /// Answers from memory on the caller's thread, without waiting; `None` if the method needs
    /// [`Self::call`].
    ///
    /// For a list, the response is this backend's part: an encoded message. Its repeated field is
    /// appended to the fields of other backends.
    fn snapshot(&self, method: Method, message: &[u8]) -> Option<Result<Bytes, Status>>;

    /// Returns why a pod routed to this backend runs on the node instead, as the end of the
    /// sentence "it ..."; `None` if the pod runs here. The encoded `RunPodSandboxRequest` and
    /// memory decide.
    fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        let _ = message;
        None
    }

    /// Returns, from memory, the features that pods of this backend may request. A user namespace
    /// is not among them.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Returns, from memory, whether an image call is for a pod of this backend: `PullImage` with
    /// the uid of a pod, `ImageStatus` with the annotations of a pod.
    fn owns_image(&self, method: Method, message: &[u8]) -> bool;

    /// Returns the encoded `ImageStatusResponse` of an image of this backend's pods. Called if an
    /// `ImageStatus` names no pod and the node lacks the image.
    fn reported_image(&self, reference: &str) -> Option<Bytes>;

    /// Answers, from memory, an `ImageStatus` that no backend owns. Its annotations must equal
    /// the annotations of this backend's pods, except for annotations that a restarted kubelet
    /// changes. Returns an encoded `ImageStatusResponse`, or `None` if the pods have different
    /// images.
    fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        let _ = message;
        None
    }

    /// Subscribes to the events of this backend's pods: encoded `ContainerEventResponse`s. The
    /// buffer is bounded: a stream ends with an error before it loses an event.
    fn events(&self) -> BoxStream<'static, Result<Bytes, Status>>;

    /// Returns this backend's part of `ListPodSandboxMetrics`, an encoded response. It has only the
    /// metrics and labels of `descriptors`, the node's encoded `ListMetricDescriptorsResponse`.
    async fn list_metrics(&self, descriptors: Bytes) -> Bytes;

    /// Answers a call of another method until `deadline` (the caller's `grpc-timeout`). Dropping
    /// the future does not undo effects.
    async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status>;

    /// Answers `RunPodSandbox` like [`Self::call`], for a pod whose routing rule limits the
    /// providers of its cell.
    async fn run_by_rule(
        &self,
        message: Bytes,
        rule: RuleProviders,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status>;
}
