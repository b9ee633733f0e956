//! How each call of CRI is routed, as data.

use crate::backends::Method;

/// A path of field numbers in a message.
pub type FieldPath = &'static [u32];

/// How a call is routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// To the node backend, as it came.
    Node,
    /// By the pod's sandbox config: the one decision.
    Run,
    /// By the pod's sandbox config as [`Route::Run`], to container runtimes only: there is no
    /// checkpoint of a pod in a cell.
    Restore,
    /// To the backend whose the id at this path is.
    ById(FieldPath),
    /// To all backends, the answers appended to one another; or, if one of these paths has an id,
    /// to the backend whose it is.
    List(&'static [FieldPath]),
    /// To the node backend; the runtime handlers of the others are appended to its answer.
    Status,
    /// To the backend whose pod the image is for, else to the node backend.
    PullImage,
    /// As [`Route::PullImage`]; what only a decoded backend knows of is its answer where the node
    /// has none.
    ImageStatus,
    /// To all container runtimes, the answers appended to one another; the metrics of the other
    /// backends are appended as the node describes its own.
    Metrics,
    /// To all container runtimes; what they send is passed on as it comes, and the events of the
    /// other backends between it.
    Events,
    /// `UNIMPLEMENTED` while there is a backend whose part would be missing; the kubelet then uses
    /// the call that lists.
    WholeNodeOnly,
}

/// What the id in field 1 of a request is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdKind {
    /// A pod sandbox.
    Sandbox,
    /// A container.
    Container,
}

/// What the id of a call is of that is routed by its id.
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

/// The row of a method that CRI did not have when this was built, by its `:path`. CRI's lists, and
/// what streams them, are called so: without the part of the other backends such an answer would
/// hide pods, and a kubelet does without a call that is not there. Everything else goes to the node
/// backend.
pub fn route_unknown(path: &str) -> Route {
    match path.strip_prefix("/runtime.v1.RuntimeService/") {
        Some(name) if ["List", "Stream"].iter().any(|verb| name.starts_with(verb)) => {
            Route::WholeNodeOnly
        }
        _ => Route::Node,
    }
}

/// The row of a method.
pub const fn route(method: Method) -> Route {
    match method {
        Method::RunPodSandbox => Route::Run,
        Method::RestorePod => Route::Restore,

        // pod_sandbox_id or container_id, all of them in field 1.
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
