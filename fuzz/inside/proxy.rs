//! Fuzz targets for bytes of callers and of container runtimes.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use kiyot_proto::cri;
use prost::Message as _;

use super::{
    copy_body::GRPC_STATUS,
    deadline::Deadline,
    frame::{self, Frame, HEADER_BYTES},
    id_cache::IdCache,
    merge,
};
use crate::backends::{Features, Method, cri::UnaryResponse};

/// Merges responses with a list of a decoded backend. Then appends a handler to each response that
/// is a status. Each response is received in two parts.
///
/// # Panics
/// If a merged list is not a single message with the entries of all lists, or if a status changed
/// apart from its handlers.
pub fn merge(parts: &[&[u8]], ours: &[u8]) {
    let responses = parts.iter().map(|part| response(part)).collect();
    if let Ok(merged) = merge::lists(responses, vec![Bytes::copy_from_slice(ours)]) {
        let body = merged.body.concat();
        let Frame::Complete { length, compressed: false } = frame::parse(&body) else {
            panic!("no complete message: {body:?}")
        };
        assert_eq!(body.len(), HEADER_BYTES + length);
        let read = |message: &[u8]| {
            cri::ListContainersResponse::decode(message).map(|list| list.containers)
        };
        let each: Result<Vec<_>, _> = parts
            .iter()
            .filter_map(|part| part.get(HEADER_BYTES..))
            .chain([ours])
            .map(read)
            .collect();
        if let Ok(each) = each {
            assert_eq!(read(&body[HEADER_BYTES..]), Ok(each.concat()));
        }
    }
    for part in parts {
        let features = Features {
            recursive_read_only_mounts: !ours.is_empty(),
            may_be_on_node: ours.len() > 1,
        };
        let before = part.get(HEADER_BYTES..).map(cri::StatusResponse::decode);
        if let (Ok(merged), Some(Ok(before))) =
            (merge::status(response(part), &[("kiyot", features)]), before)
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
            let after = cri::StatusResponse::decode(&merged.body.concat()[HEADER_BYTES..]);
            assert_eq!(
                after.as_ref().map(names),
                Ok([expected, vec!["kiyot".to_owned()]].concat())
            );
            assert_eq!(
                after.map(|after| (after.status, after.info, after.features)),
                Ok((before.status, before.info, before.features))
            );
        }
        if let Some(message) = merge::single_message(&mut response(part)) {
            assert!(message.len() + HEADER_BYTES <= part.len());
        }
    }
}

/// Parses bytes as a frame, as messages to learn from, and as a `grpc-timeout`.
///
/// # Panics
/// If an incomplete frame is parsed as complete.
pub fn frame(bytes: &[u8]) {
    if let Frame::Complete { length, .. } = frame::parse(bytes) {
        assert!(HEADER_BYTES + length <= bytes.len());
    }
    let id_cache = IdCache::default();
    for method in [
        Method::RunPodSandbox,
        Method::CreateContainer,
        Method::ListPodSandbox,
        Method::ListContainers,
    ] {
        id_cache.learn(method, 1, bytes, bytes);
        let _ = id_cache.runtime_of_image(Method::PullImage, bytes);
        let _ = id_cache.runtime_of_image(Method::ImageStatus, bytes);
    }
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", value);
        let _ = Deadline::from_headers(&headers).instant();
    }
}

/// Returns a successful response in two parts.
fn response(bytes: &[u8]) -> UnaryResponse {
    let (one, other) = bytes.split_at(bytes.len() / 2);
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    let body = vec![Bytes::copy_from_slice(one), Bytes::copy_from_slice(other)];
    UnaryResponse { head: Response::new(()).into_parts().0, body, trailers: Some(trailers) }
}
