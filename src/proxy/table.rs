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
    /// By the pod's sandbox config as [`Route::Run`], to container runtimes only: there is no checkpoint of a pod in a cell.
    Restore,
    /// To the backend whose the id at this path is.
    ById(FieldPath),
    /// To all backends, the answers appended to one another; or, if one of these paths has an id, to the backend whose it is.
    List(&'static [FieldPath]),
    /// To the node backend; the runtime handlers of the others are appended to its answer.
    Status,
    /// To the backend whose pod the image is for, else to the node backend.
    PullImage,
    /// As [`Route::PullImage`]; what only a decoded backend knows of is its answer where the node has none.
    ImageStatus,
    /// To all container runtimes, the answers appended to one another; the metrics of the other backends are appended as the node describes its own.
    Metrics,
    /// To all container runtimes; what they send is passed on as it comes, and the events of the other backends between it.
    Events,
    /// `UNIMPLEMENTED` while there is a backend whose part would be missing; the kubelet then uses the call that lists.
    WholeNodeOnly,
}

/// What the id in field 1 of a request is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// A pod sandbox.
    Sandbox,
    /// A container.
    Container,
}

/// What the id of a call is of that is routed by its id.
pub const fn names(method: Method) -> Names {
    match method {
        Method::StopPodSandbox
        | Method::RemovePodSandbox
        | Method::PodSandboxStatus
        | Method::CreateContainer
        | Method::PortForward
        | Method::PodSandboxStats
        | Method::CheckpointPod
        | Method::UpdatePodSandboxResources => Names::Sandbox,
        _ => Names::Container,
    }
}

/// The row of a method that CRI did not have when this was built, by its `:path`. CRI's lists, and what streams them, are called so: without the part of the
/// other backends such an answer would hide pods, and a kubelet does without a call that is not there. Everything else goes to the node backend.
pub fn unknown(path: &str) -> Route {
    match path.strip_prefix("/runtime.v1.RuntimeService/") {
        Some(name) if ["List", "Stream"].iter().any(|verb| name.starts_with(verb)) => Route::WholeNodeOnly,
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
mod tests {
    use kiyot_proto::DESCRIPTORS;
    use prost::Message;
    use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};

    use super::*;

    /// The name of the field at a path in a method's request, read from the descriptors of CRI.
    fn field_name(method: Method, path: &[u32]) -> String {
        let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
        let rpc = file.service.iter().flat_map(|service| &service.method).find(|rpc| rpc.name() == method.name()).unwrap();
        let mut name = rpc.input_type().to_string();
        for (depth, number) in path.iter().enumerate() {
            let message = file.message_type.iter().find(|message| name == format!(".runtime.v1.{}", message.name())).unwrap();
            let field = message.field.iter().find(|field| field.number() == *number as i32).unwrap();
            if depth + 1 == path.len() {
                assert_eq!(field.r#type(), Type::String);
                return field.name().to_string();
            }
            name = field.type_name().to_string();
        }
        panic!("an empty path");
    }

    #[test]
    fn ids_are_where_the_descriptors_have_them() {
        for &method in Method::ALL {
            match route(method) {
                Route::ById(path) => {
                    let name = if names(method) == Names::Sandbox { "pod_sandbox_id" } else { "container_id" };
                    assert_eq!(field_name(method, path), name, "{method}");
                }
                Route::List(paths) => {
                    for path in paths {
                        assert!(["pod_sandbox_id", "id"].contains(&field_name(method, path).as_str()), "{method}");
                    }
                }
                _ => {}
            }
        }
    }

    #[test]
    fn every_request_with_an_id_is_routed_by_it() {
        let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
        for rpc in file.service.iter().flat_map(|service| &service.method) {
            let message = file.message_type.iter().find(|message| rpc.input_type().ends_with(&format!(".{}", message.name()))).unwrap();
            let by_id = message.field.iter().any(|field| ["pod_sandbox_id", "container_id"].contains(&field.name()));
            let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
            assert_eq!(by_id, matches!(route(method), Route::ById(_)), "{method}");
            let streams = matches!(route(method), Route::WholeNodeOnly | Route::Events);
            assert_eq!(rpc.server_streaming() && method != Method::StreamImages, streams, "{method}");
        }
    }

    /// Each known list or stream is routed as such, so the names tell.
    #[test]
    fn a_list_is_known_by_its_name() {
        for path in ["/runtime.v1.RuntimeService/ListPods", "/runtime.v1.RuntimeService/StreamPods"] {
            assert_eq!(unknown(path), Route::WholeNodeOnly);
        }
        for path in ["/runtime.v1.RuntimeService/Levitate", "/runtime.v1.ImageService/ListLayers", "/runtime.v9.RuntimeService/ListPods", "/x"] {
            assert_eq!(unknown(path), Route::Node);
        }
        // The kubelet is told of metrics once, by the node.
        for &method in Method::ALL.iter().filter(|method| **method != Method::ListMetricDescriptors) {
            let whole = matches!(route(method), Route::List(_) | Route::Metrics | Route::WholeNodeOnly);
            assert_eq!(unknown(method.path()) == Route::WholeNodeOnly, whole, "{method}");
        }
    }

    /// What is merged must be one repeated field: then appending the encoded answers is what a decoder would do.
    #[test]
    fn merged_answers_have_one_repeated_field() {
        let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
        for rpc in file.service.iter().flat_map(|service| &service.method) {
            let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
            if matches!(route(method), Route::List(_) | Route::Metrics) {
                let message = file.message_type.iter().find(|message| rpc.output_type().ends_with(&format!(".{}", message.name()))).unwrap();
                let [field] = message.field.as_slice() else { panic!("{method}: more than one field") };
                assert_eq!(field.label(), prost_types::field_descriptor_proto::Label::Repeated, "{method}");
            }
        }
    }
}
