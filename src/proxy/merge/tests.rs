use http::{HeaderValue, Response};
use kiyot_proto::cri;
use proptest::prelude::*;
use prost::Message;

use super::*;

fn response(message: &[u8], cuts: &[usize]) -> UnaryResponse {
    let mut rest = Bytes::from([frame::header(message.len()).as_slice(), message].concat());
    let mut body = Vec::new();
    for &cut in cuts {
        body.push(rest.split_to(cut.min(rest.len())));
    }
    body.push(rest);
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    UnaryResponse { head: Response::new(()).into_parts().0, body, trailers: Some(trailers) }
}

fn failed(status: &'static str) -> UnaryResponse {
    let mut failed = response(&[], &[]);
    failed.trailers.as_mut().unwrap().insert(GRPC_STATUS, HeaderValue::from_static(status));
    failed
}

fn decoded<M: Message + Default>(merged: &Merged) -> M {
    let body = merged.body.concat();
    let Frame::Complete { length, compressed: false } = frame::parse(&body) else {
        panic!("not a message")
    };
    assert_eq!(body.len(), HEADER_BYTES + length);
    M::decode(&body[HEADER_BYTES..]).unwrap()
}

fn sandboxes(ids: &[String]) -> Vec<u8> {
    let items =
        ids.iter().map(|id| cri::PodSandbox { id: id.clone(), ..Default::default() }).collect();
    cri::ListPodSandboxResponse { items }.encode_to_vec()
}

proptest! {
    #[test]
    fn appended_lists_decode_as_one_list(
        parts in proptest::collection::vec(proptest::collection::vec("[a-z0-9]{0,40}", 0..5), 1..4),
        more in proptest::collection::vec(proptest::collection::vec("[a-z0-9]{0,40}", 0..5), 0..3),
        cuts in proptest::collection::vec(0_usize..30, 0..6),
    ) {
        let responses = parts.iter().map(|ids| response(&sandboxes(ids), &cuts)).collect();
        let further = more.iter().map(|ids| sandboxes(ids).into()).collect();
        let merged = lists(responses, further).unwrap();
        let items = decoded::<cri::ListPodSandboxResponse>(&merged).items;
        let ids: Vec<_> = items.into_iter().map(|item| item.id).collect();
        prop_assert_eq!(ids, parts.into_iter().chain(more).flatten().collect::<Vec<_>>());
    }

    #[test]
    fn random_response_never_panics(
        body in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..8), 0..4),
    ) {
        let mut garbage = response(&[], &[]);
        garbage.body = body.into_iter().map(Bytes::from).collect();
        let _ = single_message(&mut garbage);
        let _ = lists(vec![garbage], vec![]);
    }
}

#[test]
fn error_response_is_forwarded_unchanged() {
    let merged = lists(vec![response(b"", &[]), failed("14")], vec![]).unwrap();
    assert_eq!(merged.trailers.unwrap()[GRPC_STATUS], "14");
}

#[test]
fn merged_list_above_the_message_limit_is_refused() {
    let half = vec![0; MAX_MESSAGE_BYTES / 2];
    let merged = lists(vec![response(&half, &[])], vec![half.clone().into()]).unwrap();
    assert_eq!(merged.body.iter().map(Bytes::len).sum::<usize>(), MAX_MESSAGE_BYTES + HEADER_BYTES);
    let refused =
        lists(vec![response(&half, &[])], vec![half.into(), Bytes::from_static(b"x")]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
}

#[test]
fn compressed_response_is_refused() {
    let mut compressed = response(b"abc", &[]);
    compressed.body = vec![Bytes::from_static(&[1, 0, 0, 0, 0])];
    assert_eq!(lists(vec![compressed], vec![]).unwrap_err().code(), tonic::Code::Internal);
}

#[test]
fn handlers_are_appended_with_the_default_handler_to_an_empty_list() {
    let names = |merged: &Merged| {
        decoded::<cri::StatusResponse>(merged)
            .runtime_handlers
            .into_iter()
            .map(|handler| handler.name)
            .collect::<Vec<_>>()
    };
    let old =
        cri::StatusResponse { status: Some(cri::RuntimeStatus::default()), ..Default::default() };
    let merged =
        status(response(&old.encode_to_vec(), &[]), &[("kiyot", Features::default())]).unwrap();
    assert_eq!(names(&merged), ["", "kiyot"]);
    assert_eq!(decoded::<cri::StatusResponse>(&merged).status, old.status);
    assert!(
        decoded::<cri::StatusResponse>(&merged)
            .runtime_handlers
            .iter()
            .all(|handler| handler.features.is_some())
    );

    let new = cri::StatusResponse {
        runtime_handlers: ["", "runc"]
            .map(|name| cri::RuntimeHandler { name: name.into(), features: None })
            .into(),
        ..old
    };
    assert_eq!(
        names(
            &status(response(&new.encode_to_vec(), &[3, 9]), &[("kiyot", Features::default())])
                .unwrap()
        ),
        ["", "runc", "kiyot"]
    );
    assert_eq!(names(&status(response(&new.encode_to_vec(), &[]), &[]).unwrap()), ["", "runc"]);
}

/// Verifies D43.
#[test]
fn handler_has_only_features_that_all_runtimes_of_its_pods_have() {
    let handler = |name: &str, recursive_read_only_mounts| {
        let features = Some(cri::RuntimeHandlerFeatures {
            recursive_read_only_mounts,
            user_namespaces: recursive_read_only_mounts,
        });
        cri::RuntimeHandler { name: name.into(), features }
    };
    let said = |node: &[cri::RuntimeHandler], features| {
        let node = cri::StatusResponse { runtime_handlers: node.to_vec(), ..Default::default() };
        let merged = status(
            response(&node.encode_to_vec(), &[7]),
            &[("other", Features::default()), ("kiyot", features)],
        )
        .unwrap();
        let handlers = decoded::<cri::StatusResponse>(&merged).runtime_handlers;
        assert!(
            handlers
                .iter()
                .filter(|handler| ["other", "kiyot"].contains(&&*handler.name))
                .all(|one| !one.features.unwrap().user_namespaces)
        );
        assert!(
            !handlers
                .iter()
                .find(|handler| handler.name == "other")
                .unwrap()
                .features
                .unwrap()
                .recursive_read_only_mounts
        );
        handlers
            .iter()
            .find(|handler| handler.name == "kiyot")
            .unwrap()
            .features
            .unwrap()
            .recursive_read_only_mounts
    };
    let (old, later) =
        ([handler("", false), handler("runc", true)], [handler("runc", false), handler("", true)]);
    for (in_cells, may_be_on_node, [without, with_old, with_later]) in [
        (false, false, [false; 3]),
        (false, true, [false; 3]),
        (true, false, [true; 3]),
        (true, true, [false, false, true]),
    ] {
        let features = Features { recursive_read_only_mounts: in_cells, may_be_on_node };
        assert_eq!(
            [said(&[], features), said(&old, features), said(&later, features)],
            [without, with_old, with_later],
            "{features:?}"
        );
    }
}
