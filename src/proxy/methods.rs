//! The routing of each CRI method, as data.

use crate::backends::Method;

/// Path of field numbers in a message.
pub type FieldPath = &'static [u32];

/// The routing of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Forwarded to the node backend.
    Node,
    /// Routed by the pod's sandbox config (`proxy/routing`).
    Run,
    /// Routed like [`Route::Run`], to container runtimes only, because pods in cells have no
    /// checkpoints.
    Restore,
    /// Routed to the backend that has the id at this path.
    ById(FieldPath),
    /// Sent to all backends, and their responses are appended. With an id at one of these paths,
    /// sent only to the backend that has the id.
    List(&'static [FieldPath]),
    /// Sent to the node backend. The runtime handlers of other backends are appended.
    Status,
    /// Sent to the backend of the image's pod, or to the node backend if the pod is unknown.
    PullImage,
    /// Sent like [`Route::PullImage`]. If the node lacks the image, a decoded backend may answer.
    ImageStatus,
    /// Sent to all container runtimes. Their responses are appended, then the metrics of decoded
    /// backends that the node describes.
    Metrics,
    /// Sent to all container runtimes. Their events are merged with the events of decoded backends.
    Events,
    /// Forwarded if the node backend is the only backend, else `UNIMPLEMENTED`, because pods of
    /// other backends would be missing. The kubelet then calls the list method.
    WholeNodeOnly,
}

/// The object that the id in field 1 of a request names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdKind {
    /// A pod sandbox.
    Sandbox,
    /// A container.
    Container,
}

/// Returns the object that the id of a [`Route::ById`] method names.
pub const fn id_kind(method: Method) -> IdKind {
    match method {
        Method::StopPodSandbox
        | Method::RemovePodSandbox
        | Method::PodSandboxStatus
        | Method::CreateContainer
        | Method::PortForward
        | Method::PodSandboxStats
        | Method::CheckpointPod
        | Method::UpdatePodSandboxResources => IdKind::Sandbox,
        _ => IdKind::Container,
    }
}

/// Returns the routing of a method that this version of CRI lacks, by its `:path`. The names of
/// lists and their streams identify them. They would hide the pods of other backends, and a kubelet
/// does without an unimplemented method. All other methods are forwarded to the node backend,
/// unless they name a pod in a cell (`cell_guard`).
pub fn route_unknown(path: &str) -> Route {
    match path.strip_prefix("/runtime.v1.RuntimeService/") {
        Some(name) if ["List", "Stream"].iter().any(|verb| name.starts_with(verb)) => {
            Route::WholeNodeOnly
        }
        _ => Route::Node,
    }
}

/// Returns the routing of a method.
pub const fn route(method: Method) -> Route {
    match method {
        Method::RunPodSandbox => Route::Run,
        Method::RestorePod => Route::Restore,

        // pod_sandbox_id or container_id, always in field 1
        Method::StopPodSandbox
        | Method::RemovePodSandbox
        | Method::PodSandboxStatus
        | Method::CreateContainer
        | Method::StartContainer
        | Method::StopContainer
        | Method::RemoveContainer
        | Method::ContainerStatus
        | Method::UpdateContainerResources
        | Method::ReopenContainerLog
        | Method::ExecSync
        | Method::Exec
        | Method::Attach
        | Method::PortForward
        | Method::ContainerStats
        | Method::PodSandboxStats
        | Method::CheckpointContainer
        | Method::CheckpointPod
        | Method::UpdatePodSandboxResources => Route::ById(&[1]),

        // filter.id, filter.pod_sandbox_id
        Method::ListPodSandbox | Method::ListPodSandboxStats => Route::List(&[&[1, 1]]),
        Method::ListContainers => Route::List(&[&[1, 1], &[1, 3]]),
        Method::ListContainerStats => Route::List(&[&[1, 1], &[1, 2]]),
        Method::ListPodSandboxMetrics => Route::Metrics,

        Method::StreamPodSandboxes
        | Method::StreamContainers
        | Method::StreamContainerStats
        | Method::StreamPodSandboxStats
        | Method::StreamPodSandboxMetrics => Route::WholeNodeOnly,

        Method::GetContainerEvents => Route::Events,

        Method::Status => Route::Status,
        Method::PullImage => Route::PullImage,
        Method::ImageStatus => Route::ImageStatus,

        Method::Version
        | Method::UpdateRuntimeConfig
        | Method::ListMetricDescriptors
        | Method::RuntimeConfig
        | Method::ListImages
        | Method::StreamImages
        | Method::RemoveImage
        | Method::ImageFsInfo => Route::Node,
    }
}

#[cfg(test)]
mod tests;
