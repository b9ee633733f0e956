use std::collections::{BTreeMap, BTreeSet};

use kiyot_proto::DESCRIPTORS;
use prost::Message;
use prost_types::{FileDescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};

use super::*;

/// Returns the name of the field at a path in a method's request, from the descriptors of CRI.
fn field_name(method: Method, path: &[u32]) -> String {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    let rpc = file
        .service
        .iter()
        .flat_map(|service| &service.method)
        .find(|rpc| rpc.name() == method.name())
        .unwrap();
    let mut name = rpc.input_type().to_string();
    for (depth, number) in path.iter().enumerate() {
        let message = file
            .message_type
            .iter()
            .find(|message| name == format!(".runtime.v1.{}", message.name()))
            .unwrap();
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
fn id_paths_match_the_descriptors() {
    for &method in Method::ALL {
        match route(method) {
            Route::ById(path) => {
                let name = if id_kind(method) == IdKind::Sandbox {
                    "pod_sandbox_id"
                } else {
                    "container_id"
                };
                assert_eq!(field_name(method, path), name, "{method}");
            }
            Route::List(paths) => {
                for path in paths {
                    assert!(
                        ["pod_sandbox_id", "id"].contains(&field_name(method, path).as_str()),
                        "{method}"
                    );
                }
            }
            _ => {}
        }
    }
}

#[test]
fn request_with_an_id_is_routed_by_that_id() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    for rpc in file.service.iter().flat_map(|service| &service.method) {
        let message = file
            .message_type
            .iter()
            .find(|message| rpc.input_type().ends_with(&format!(".{}", message.name())))
            .unwrap();
        let by_id = message
            .field
            .iter()
            .any(|field| ["pod_sandbox_id", "container_id"].contains(&field.name()));
        let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
        assert_eq!(by_id, matches!(route(method), Route::ById(_)), "{method}");
        let streams = matches!(route(method), Route::WholeNodeOnly | Route::Events);
        assert_eq!(rpc.server_streaming() && method != Method::StreamImages, streams, "{method}");
    }
}

/// The names of all known lists and streams identify them.
///
/// Verifies F7.
#[test]
fn unknown_list_is_identified_by_its_name() {
    for path in ["/runtime.v1.RuntimeService/ListPods", "/runtime.v1.RuntimeService/StreamPods"] {
        assert_eq!(route_unknown(path), Route::WholeNodeOnly);
    }
    for path in [
        "/runtime.v1.RuntimeService/Levitate",
        "/runtime.v1.ImageService/ListLayers",
        "/runtime.v9.RuntimeService/ListPods",
        "/x",
    ] {
        assert_eq!(route_unknown(path), Route::Node);
    }
    // Only the node describes metrics.
    for &method in Method::ALL.iter().filter(|method| **method != Method::ListMetricDescriptors) {
        let whole = matches!(route(method), Route::List(_) | Route::Metrics | Route::WholeNodeOnly);
        assert_eq!(route_unknown(method.path()) == Route::WholeNodeOnly, whole, "{method}");
    }
}

/// A decoder concatenates repeated fields, so that encoded responses can be appended.
#[test]
fn merged_responses_have_one_repeated_field() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    for rpc in file.service.iter().flat_map(|service| &service.method) {
        let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
        if matches!(route(method), Route::List(_) | Route::Metrics) {
            let message = file
                .message_type
                .iter()
                .find(|message| rpc.output_type().ends_with(&format!(".{}", message.name())))
                .unwrap();
            let [field] = message.field.as_slice() else { panic!("{method}: more than one field") };
            assert_eq!(
                field.label(),
                prost_types::field_descriptor_proto::Label::Repeated,
                "{method}"
            );
        }
    }
}

/// Fields of requests that look like ids of sandboxes or containers, and their treatment.
const IN_REQUESTS: &[(&str, &str, &str)] = &[
    ("CheckpointPodRequest", "container_ids", "routed by the sandbox; UNIMPLEMENTED for cells"),
    ("ContainerFilter", "id", "a list: the backend of the id, or all"),
    ("ContainerFilter", "pod_sandbox_id", "a list: the backend of the id, or all"),
    ("ContainerStatsFilter", "id", "a list: the backend of the id, or all"),
    ("ContainerStatsFilter", "pod_sandbox_id", "a list: the backend of the id, or all"),
    ("PodSandboxFilter", "id", "a list: the backend of the id, or all"),
    ("PodSandboxStatsFilter", "id", "a list: the backend of the id, or all"),
    (
        "NamespaceOption",
        "target_id",
        "of CreateContainer, which is routed by its sandbox; rewritten",
    ),
    ("IDMapping", "container_id", "a uid in a container"),
    ("IDMapping", "host_id", "a uid of the node"),
];

/// Fields of responses that look like ids. Responses of cells have kiyot's ids. Responses of
/// container runtimes are forwarded.
const IN_RESPONSES: &[(&str, &str, &str)] = &[
    ("Container", "id", "read model: ours"),
    ("Container", "image_id", "read model: the image's"),
    ("Container", "pod_sandbox_id", "read model: ours"),
    ("ContainerAttributes", "id", "response: ours"),
    ("ContainerEventResponse", "container_id", "read model: ours"),
    ("ContainerMetrics", "container_id", "read model: ours"),
    ("ContainerStatus", "id", "response: ours"),
    ("ContainerStatus", "image_id", "response: the image's"),
    ("CreateContainerResponse", "container_id", "create_container: ours"),
    ("FilesystemUsage", "fs_id", "a mount point"),
    ("IDMapping", "container_id", "a uid in a container"),
    ("IDMapping", "host_id", "a uid of the node"),
    ("Image", "id", "the image's"),
    ("NamespaceOption", "target_id", "response: as the kubelet sent it"),
    ("PodSandbox", "id", "read model: ours"),
    ("PodSandboxAttributes", "id", "response: ours"),
    ("PodSandboxMetrics", "pod_sandbox_id", "read model: ours"),
    ("PodSandboxStatus", "id", "response: ours"),
    ("RestorePodResponse", "pod_sandbox_id", "the runtime's: no pod in a cell is restored"),
    ("RestoredContainer", "container_id", "the runtime's: no pod in a cell is restored"),
    ("RunPodSandboxResponse", "pod_sandbox_id", "run_sandbox: ours"),
    ("WindowsFilesystemUsage", "fs_id", "a mount point"),
];

/// Returns the fields that look like ids, singular or plural, of all messages within the roots.
fn ids_within(
    file: &FileDescriptorProto,
    roots: impl Iterator<Item = String>,
) -> BTreeSet<(String, String)> {
    let mut messages = BTreeMap::new();
    for message in &file.message_type {
        let name = format!(".runtime.v1.{}", message.name());
        // Entries of maps may have messages.
        messages.extend(
            message.nested_type.iter().map(|nested| (format!("{name}.{}", nested.name()), nested)),
        );
        messages.insert(name, message);
    }
    let (mut waiting, mut seen, mut ids): (Vec<String>, _, _) =
        (roots.collect(), BTreeSet::new(), BTreeSet::new());
    while let Some(name) = waiting.pop() {
        let Some(message) = messages.get(&name) else { panic!("{name} is no message of CRI") };
        if !seen.insert(name) {
            continue;
        }
        for field in &message.field {
            let words: Vec<&str> = field.name().split('_').collect();
            if words.last().is_some_and(|word| ["id", "ids"].contains(word)) {
                ids.insert((message.name().to_owned(), field.name().to_owned()));
            }
            if field.r#type() == Type::Message {
                waiting.push(field.type_name().to_owned());
            }
        }
    }
    ids
}

/// Verifies F4.
#[test]
fn ids_of_all_messages_have_a_known_treatment() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    let rpcs = || file.service.iter().flat_map(|service| &service.method);
    let listed = |list: &[(&str, &str, &str)]| {
        list.iter()
            .map(|(message, field, _)| (message.to_string(), field.to_string()))
            .collect::<BTreeSet<_>>()
    };

    let mut requests = listed(IN_REQUESTS);
    for &method in Method::ALL {
        let input = rpcs()
            .find(|rpc| rpc.name() == method.name())
            .unwrap()
            .input_type()
            .rsplit('.')
            .next()
            .unwrap();
        if let Route::ById(path) = route(method) {
            requests.insert((input.to_owned(), field_name(method, path)));
        }
    }
    assert_eq!(
        ids_within(file, rpcs().map(|rpc| rpc.input_type().to_owned())),
        requests,
        "left: ids in requests, right: known ids"
    );
    assert_eq!(
        ids_within(file, rpcs().map(|rpc| rpc.output_type().to_owned())),
        listed(IN_RESPONSES),
        "left: ids in responses, right: known ids"
    );
}

/// A list by an id of a cell is answered by the cells alone, whichever field of the filter has it.
///
/// Verifies F4.
#[test]
fn list_is_routed_by_each_id_of_its_filter() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    for rpc in file.service.iter().flat_map(|service| &service.method) {
        let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
        let Route::List(paths) = route(method) else { continue };
        let within: BTreeSet<String> = ids_within(file, [rpc.input_type().to_owned()].into_iter())
            .into_iter()
            .map(|(_, field)| field)
            .collect();
        let routed_by: BTreeSet<String> =
            paths.iter().map(|path| field_name(method, path)).collect();
        assert_eq!(within, routed_by, "{method}");
    }
}
