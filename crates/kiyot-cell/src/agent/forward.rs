//! CRI, forwarded to the cell's containerd as it came: bytes, metadata, trailers.

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use http_body_util::Limited;
use tonic::{Status, body::Body};
use tower::{BoxError, Service, ServiceExt};

use super::runtime::{MESSAGE_LIMIT, Runtime};

/// A message's head in gRPC's framing, in bytes.
const FRAME_HEAD: usize = 5;

/// Whether a path is one of CRI's.
pub fn is_cri(path: &str) -> bool {
    path.starts_with("/runtime.v1.RuntimeService/") || path.starts_with("/runtime.v1.ImageService/")
}

/// Sends a call to containerd and hands back its answer. Either way no more than one message of the largest size goes through.
pub async fn forward<B>(runtime: &Runtime, request: Request<B>) -> Response<Body>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let limit = MESSAGE_LIMIT + FRAME_HEAD;
    let request = request.map(|body| Body::new(Limited::new(body, limit)));
    let answer = async { runtime.channel().ready().await?.call(request).await }.await;
    match answer {
        Ok(answer) => answer.map(|body| Body::new(Limited::new(body, limit))),
        Err(error) => Status::unavailable(format!("the cell's containerd: {}", crate::with_sources(&error))).into_http(),
    }
}
