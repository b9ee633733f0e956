//! gRPC calls to a cell over its current connection.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{Uri, uri::PathAndQuery};
use tokio::time::{Instant, timeout_at};
use tonic::{Status, body::Body};
use tower::Service;

use crate::connection::Connection;

mod grpc_timeout;
mod response_body;
mod sanitize;
mod slot;

pub use sanitize::{MAX_MESSAGE_BYTES, is_unsafe_control, sanitize, truncate};
pub use slot::{Offer, OfferError, Slot};

/// The `:authority` of all calls. Required by HTTP/2, never resolved.
const AUTHORITY: &str = "cell.kiyot.internal";

/// A channel for tonic clients that calls over the current connection of a [`Slot`]. Cheap to
/// clone.
///
/// A call waits for a connection until its deadline, and then fails with UNAVAILABLE.
/// The deadline is the request's `grpc-timeout` ([`tonic::Request::set_timeout`]), or
/// [`Channel::DEFAULT_TIMEOUT`].
///
/// - A `grpc-timeout` covers the whole response: the call fails with DEADLINE_EXCEEDED even after
///   the response has begun, so that a peer that stops sending holds up no caller.
/// - The default timeout covers the response's head only, because the response may be a stream. A
///   call that sends a long stream before its response begins must set a timeout.
/// - A call whose connection ends, or is replaced by a newer one, fails with UNAVAILABLE, in its
///   response stream too.
/// - A call that was not sent is retried over the next connection.
/// - Error messages of the peer are cut to [`MAX_MESSAGE_BYTES`] and stripped of control characters
///   other than line ends and tabs. All other metadata is removed.
#[derive(Debug, Clone)]
pub struct Channel(Slot);

impl Channel {
    /// The timeout of a call without a `grpc-timeout`.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(20);

    /// Creates a channel over a single connection.
    pub fn over(connection: Connection) -> Self {
        let slot = Slot::new("single connection of the link");
        // A new slot accepts any connection.
        let _ = slot.offer(Offer {
            connection,
            incarnation: String::new(),
            generation: 1,
            sequence: 0,
        });
        slot.channel()
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let slot = self.0.clone();
        let timeout = grpc_timeout::parse(request.headers());
        Box::pin(async move {
            call(
                &slot,
                with_absolute_uri(request)?,
                Instant::now() + timeout.unwrap_or(Self::DEFAULT_TIMEOUT),
                timeout.is_some(),
            )
            .await
        })
    }
}

/// Sends a request over the current connection. With `covers_body` the deadline holds for the whole
/// response, otherwise for its head only.
async fn call(
    slot: &Slot,
    mut request: http::Request<Body>,
    deadline: Instant,
    covers_body: bool,
) -> Result<http::Response<Body>, Status> {
    let mut failed = None;
    loop {
        let connection = slot.acquire(failed.as_ref(), deadline).await?;
        let Some(open) = connection.start_call() else {
            // The idle timeout has just closed it.
            failed = Some(connection);
            continue;
        };
        match timeout_at(deadline, connection.sender().try_send_request(request)).await {
            Ok(Ok(response)) => {
                let mut response = response.map(|body| {
                    Body::new(response_body::ResponseBody::new(
                        body,
                        open,
                        covers_body.then_some(deadline),
                    ))
                });
                sanitize::clean(response.headers_mut());
                return Ok(response);
            }
            Ok(Err(mut error)) => match error.take_message() {
                // The request was not sent.
                Some(unsent) => request = unsent,
                None => return Err(response_body::to_status(&error.into_error(), slot.name())),
            },
            Err(_) => {
                return Err(Status::deadline_exceeded(format!(
                    "{}: no response within the call's deadline",
                    slot.name()
                )));
            }
        }
        failed = Some(connection);
    }
}

/// Makes the request's URI absolute, as HTTP/2 requires.
fn with_absolute_uri(mut request: http::Request<Body>) -> Result<http::Request<Body>, Status> {
    let path =
        request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let uri = Uri::builder().scheme("https").authority(AUTHORITY).path_and_query(path).build();
    *request.uri_mut() =
        uri.map_err(|error| Status::internal(format!("URI of a call: {error}")))?;
    *request.version_mut() = http::Version::HTTP_2;
    Ok(request)
}
