//! A channel: calls over whichever connection is the current one.

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

mod answer;
mod deadline;
mod sanitize;
mod slot;

pub use sanitize::{LONGEST_MESSAGE, is_no_word, sanitize, shortened};
pub use slot::{Offer, Refused, Slot};

/// The authority in the calls' addresses. Nobody resolves it; HTTP/2 asks for one.
const AUTHORITY: &str = "cell.kiyot.internal";

/// Where a client of tonic sends its calls. Cheap to clone.
///
/// A call waits for the current connection when there is none, and fails with UNAVAILABLE at its
/// deadline: the `grpc-timeout` of the request (set it with [`tonic::Request::set_timeout`]), else
/// [`Channel::PATIENCE`]. At a deadline of its own it fails with DEADLINE_EXCEEDED, though the
/// answer may have begun: nobody is kept waiting by who sends no more. `PATIENCE` holds until the
/// answer's head is there, for it may be a stream; so a call that sends a long stream before it is
/// answered must set a deadline. A call whose connection ends, or is replaced by a newer one, fails
/// with UNAVAILABLE, in its answer's stream too. A call that was not sent is tried again over the
/// next connection. A failure's message is the other side's, at most [`LONGEST_MESSAGE`] bytes of it
/// and without control characters other than line ends and tabs; all other metadata is left out.
#[derive(Debug, Clone)]
pub struct Channel(Slot);

impl Channel {
    /// How long a call without a deadline of its own waits.
    pub const PATIENCE: Duration = Duration::from_secs(20);

    /// A channel over one connection only.
    pub fn over(connection: Connection) -> Self {
        let slot = Slot::new("one connection of the link");
        // A new slot refuses nothing.
        let _ =
            slot.offer(Offer { connection, incarnation: String::new(), generation: 1, arrival: 0 });
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
        let of_its_own = deadline::of(request.headers());
        Box::pin(async move {
            call(
                &slot,
                addressed(request)?,
                Instant::now() + of_its_own.unwrap_or(Self::PATIENCE),
                of_its_own.is_some(),
            )
            .await
        })
    }
}

/// `of_its_own`: the deadline is one of the whole call.
async fn call(
    slot: &Slot,
    mut request: http::Request<Body>,
    deadline: Instant,
    of_its_own: bool,
) -> Result<http::Response<Body>, Status> {
    let mut failed = None;
    loop {
        let connection = slot.current(failed.as_ref(), deadline).await?;
        let Some(open) = connection.begin() else {
            // It has just run out.
            failed = Some(connection);
            continue;
        };
        match timeout_at(deadline, connection.sender().try_send_request(request)).await {
            Ok(Ok(response)) => {
                let mut response = response.map(|body| {
                    Body::new(answer::Answer::new(body, open, of_its_own.then_some(deadline)))
                });
                sanitize::clean(response.headers_mut());
                return Ok(response);
            }
            Ok(Err(mut error)) => match error.take_message() {
                // It was not sent: nobody has seen it.
                Some(unsent) => request = unsent,
                None => return Err(answer::status(&error.into_error(), slot.name())),
            },
            Err(_) => {
                return Err(Status::deadline_exceeded(format!(
                    "{}: no answer within the call's deadline",
                    slot.name()
                )));
            }
        }
        failed = Some(connection);
    }
}

/// Gives a call the absolute address that HTTP/2 asks for.
fn addressed(mut request: http::Request<Body>) -> Result<http::Request<Body>, Status> {
    let path =
        request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let uri = Uri::builder().scheme("https").authority(AUTHORITY).path_and_query(path).build();
    *request.uri_mut() =
        uri.map_err(|error| Status::internal(format!("the address of a call: {error}")))?;
    *request.version_mut() = http::Version::HTTP_2;
    Ok(request)
}
