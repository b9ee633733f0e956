use std::collections::{BTreeMap, BTreeSet};

use kiyot_proto::DESCRIPTORS;
use prost::Message;
use prost_types::{FileDescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};

use super::*;

/// The name of the field at a path in a method's request, read from the descriptors of CRI.
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
fn ids_are_where_the_descriptors_have_them() {
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
fn every_request_with_an_id_is_routed_by_it() {
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

/// Each known list or stream is routed as such, so the names tell.
/// Verifies F7.
#[test]
fn a_list_is_known_by_its_name() {
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
    // The kubelet is told of metrics once, by the node.
    for &method in Method::ALL.iter().filter(|method| **method != Method::ListMetricDescriptors) {
        let whole = matches!(route(method), Route::List(_) | Route::Metrics | Route::WholeNodeOnly);
        assert_eq!(route_unknown(method.path()) == Route::WholeNodeOnly, whole, "{method}");
    }
}

/// What is merged must be one repeated field: then appending the encoded answers is what a decoder
/// would do.
#[test]
fn merged_answers_have_one_repeated_field() {
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

/// What looks like the id of a sandbox or a container, wherever it stands in a request, and what
/// becomes of it at the CRI server.
const IN_REQUESTS: &[(&str, &str, &str)] = &[
    (
        "CheckpointPodRequest",
        "container_ids",
        "of the sandbox, by which it goes; UNIMPLEMENTED for cells",
    ),
    ("ContainerFilter", "id", "a list: its backend alone, or all"),
    ("ContainerFilter", "pod_sandbox_id", "a list: its backend alone, or all"),
    ("ContainerStatsFilter", "id", "a list: its backend alone, or all"),
    ("ContainerStatsFilter", "pod_sandbox_id", "a list: its backend alone, or all"),
    ("PodSandboxFilter", "id", "a list: its backend alone, or all"),
    ("PodSandboxStatsFilter", "id", "a list: its backend alone, or all"),
    (
        "NamespaceOption",
        "target_id",
        "of CreateContainer, which goes by its sandbox; the verb maps it",
    ),
    ("IDMapping", "container_id", "a uid in a container"),
    ("IDMapping", "host_id", "a uid of the node"),
];

/// The same of answers: those of cells are made here with our ids, those of container runtimes pass
/// as they are.
const IN_ANSWERS: &[(&str, &str, &str)] = &[
    ("Container", "id", "view: ours"),
    ("Container", "image_id", "view: the image's"),
    ("Container", "pod_sandbox_id", "view: ours"),
    ("ContainerAttributes", "id", "restored: ours"),
    ("ContainerEventResponse", "container_id", "view/events: ours"),
    ("ContainerMetrics", "container_id", "view/metrics: ours"),
    ("ContainerStatus", "id", "restored: ours"),
    ("ContainerStatus", "image_id", "restored: the image's"),
    ("CreateContainerResponse", "container_id", "create_container: ours"),
    ("FilesystemUsage", "fs_id", "a mount point"),
    ("IDMapping", "container_id", "a uid in a container"),
    ("IDMapping", "host_id", "a uid of the node"),
    ("Image", "id", "the image's"),
    ("NamespaceOption", "target_id", "restored: as the kubelet sent it"),
    ("PodSandbox", "id", "view: ours"),
    ("PodSandboxAttributes", "id", "restored: ours"),
    ("PodSandboxMetrics", "pod_sandbox_id", "view/metrics: ours"),
    ("PodSandboxStatus", "id", "restored: ours"),
    ("RestorePodResponse", "pod_sandbox_id", "the runtime's: no pod in a cell is restored"),
    ("RestoredContainer", "container_id", "the runtime's: no pod in a cell is restored"),
    ("RunPodSandboxResponse", "pod_sandbox_id", "run_sandbox: ours"),
    ("WindowsFilesystemUsage", "fs_id", "a mount point"),
];

/// Fields of messages that can be reached from some, and look like ids, whether there is one or
/// several of them.
fn ids_within(
    file: &FileDescriptorProto,
    roots: impl Iterator<Item = String>,
) -> BTreeSet<(String, String)> {
    let mut messages = BTreeMap::new();
    for message in &file.message_type {
        let name = format!(".runtime.v1.{}", message.name());
        // Entries of maps may hold messages.
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
fn every_id_of_every_message_is_accounted_for() {
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
        "left: ids in requests, right: what is known of them"
    );
    assert_eq!(
        ids_within(file, rpcs().map(|rpc| rpc.output_type().to_owned())),
        listed(IN_ANSWERS),
        "left: ids in answers, right: what is known of them"
    );
}

/// Each id that a filter can have is looked at: a list by one of them that is a cell's asks nobody
/// else.
/// Verifies F4.
#[test]
fn every_id_of_a_filter_is_looked_at() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let file = set.file.iter().find(|file| file.package() == "runtime.v1").unwrap();
    for rpc in file.service.iter().flat_map(|service| &service.method) {
        let method = *Method::ALL.iter().find(|method| method.name() == rpc.name()).unwrap();
        let Route::List(paths) = route(method) else { continue };
        let within: BTreeSet<String> = ids_within(file, [rpc.input_type().to_owned()].into_iter())
            .into_iter()
            .map(|(_, field)| field)
            .collect();
        let looked_at: BTreeSet<String> =
            paths.iter().map(|path| field_name(method, path)).collect();
        assert_eq!(within, looked_at, "{method}");
    }
}
