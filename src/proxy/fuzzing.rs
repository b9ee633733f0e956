//! What a caller and a container runtime may send, as any bytes. For kiyot-fuzz alone.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use kiyot_proto::cri;
use prost::Message as _;

use super::{
    caller::GRPC_STATUS,
    frame::{self, Body, HEAD},
    merge,
    owners::Owners,
    timeout::Budget,
};
use crate::backends::{Features, Method, cri::Answer};

/// Merges the answers that `parts` are, each in two pieces, with one list of ours. What comes of it
/// must be one whole message, with the entries of all of them where they are lists; and a status
/// must keep what it has, and get a handler more.
///
/// # Panics
/// If it isn't.
pub fn merge(parts: &[&[u8]], ours: &[u8]) {
    let answers = parts.iter().map(|part| answer(part)).collect();
    if let Ok(merged) = merge::lists(answers, vec![Bytes::copy_from_slice(ours)]) {
        let body = merged.body.concat();
        let Body::Whole { length, compressed: false } = frame::look(&body) else {
            panic!("no whole message: {body:?}")
        };
        assert_eq!(body.len(), HEAD + length);
        let read = |message: &[u8]| {
            cri::ListContainersResponse::decode(message).map(|list| list.containers)
        };
        let each: Result<Vec<_>, _> =
            parts.iter().filter_map(|part| part.get(HEAD..)).chain([ours]).map(read).collect();
        if let Ok(each) = each {
            assert_eq!(read(&body[HEAD..]), Ok(each.concat()));
        }
    }
    for part in parts {
        let features = Features {
            recursive_read_only_mounts: !ours.is_empty(),
            may_be_on_node: ours.len() > 1,
        };
        let before = part.get(HEAD..).map(cri::StatusResponse::decode);
        if let (Ok(merged), Some(Ok(before))) =
            (merge::status(answer(part), &[("kiyot", features)]), before)
        {
            let names = |status: &cri::StatusResponse| {
                status
                    .runtime_handlers
                    .iter()
                    .map(|handler| handler.name.clone())
                    .collect::<Vec<_>>()
            };
            let expected = if before.runtime_handlers.is_empty() {
                vec![String::new()]
            } else {
                names(&before)
            };
            let after = cri::StatusResponse::decode(&merged.body.concat()[HEAD..]);
            assert_eq!(
                after.as_ref().map(names),
                Ok([expected, vec!["kiyot".to_owned()]].concat())
            );
            assert_eq!(
                after.map(|after| (after.status, after.info, after.features)),
                Ok((before.status, before.info, before.features))
            );
        }
        if let Some(message) = merge::contiguous(&mut answer(part)) {
            assert!(message.len() + HEAD <= part.len());
        }
    }
}

/// Looks at a body, learns from it, and reads a `grpc-timeout`.
///
/// # Panics
/// If a frame is said to be whole that is not.
pub fn frame(bytes: &[u8]) {
    if let Body::Whole { length, .. } = frame::look(bytes) {
        assert!(HEAD + length <= bytes.len());
    }
    let owners = Owners::default();
    for method in [
        Method::RunPodSandbox,
        Method::CreateContainer,
        Method::ListPodSandbox,
        Method::ListContainers,
    ] {
        owners.learn(method, 1, bytes, bytes);
        let _ = owners.of_image(Method::PullImage, bytes);
        let _ = owners.of_image(Method::ImageStatus, bytes);
    }
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", value);
        let _ = Budget::of(&headers).deadline();
    }
}

/// An answer that is OK, in two pieces.
fn answer(bytes: &[u8]) -> Answer {
    let (one, other) = bytes.split_at(bytes.len() / 2);
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    let body = vec![Bytes::copy_from_slice(one), Bytes::copy_from_slice(other)];
    Answer { head: Response::new(()).into_parts().0, body, trailers: Some(trailers) }
}
