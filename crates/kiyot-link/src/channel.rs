//! A channel: calls over whichever connection is the current one.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tower::Service;

/// Where a client of tonic sends its calls. Cheap to clone.
///
/// A call waits for the current connection when there is none, and fails with UNAVAILABLE at its deadline: the `grpc-timeout` of the request
/// (set it with [`tonic::Request::set_timeout`]), else [`Channel::PATIENCE`]. The deadline holds until the answer's head is there.
#[derive(Debug, Clone)]
pub struct Channel {}

impl Channel {
    /// How long a call without a deadline of its own waits.
    pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
}

impl Service<http::Request<tonic::body::Body>> for Channel {
    type Response = http::Response<tonic::body::Body>;
    type Error = tonic::Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: http::Request<tonic::body::Body>) -> Self::Future {
        unimplemented!()
    }
}
