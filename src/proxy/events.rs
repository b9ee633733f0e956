//! The merged stream of container events. Messages of container runtimes are forwarded byte for
//! byte, with whole messages of decoded backends between them.
//!
//! The kubelet relies on the stream being complete. So the stream ends with the status of the first
//! part that ends or fails. The kubelet then lists, and opens the stream again or falls back to
//! polling.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

use bytes::{Bytes, BytesMut};
use futures::{
    StreamExt,
    stream::{self, BoxStream, SelectAll},
};
use http::{
    HeaderMap,
    header::CONTENT_TYPE,
    request,
    response::{self, Response},
};
use kiyot_http2::{Error, Reason, RecvStream};
use tonic::{Code, Status};

use super::{
    call::Call,
    caller::{Caller, GRPC_ACCEPT_ENCODING, finish_with_status, grpc_head, status_from_error},
    copy_body::{BodySink, CallerSink, CopyError},
    decoded::too_large,
    frame::{self, Frame, HEADER_BYTES},
};
use crate::backends::cri::Upstream;

/// An item of a part of the stream.
enum Item {
    /// The head of a response.
    Head(response::Parts),
    /// A message with its frame header.
    Message(Bytes),
    /// The end.
    End(StreamEnd),
}

/// The end of a stream.
enum StreamEnd {
    /// A response without a message ("Trailers-Only"), whose head has the status.
    Head(response::Parts),
    Trailers(Option<HeaderMap>),
    Reset(Reason),
    Status(Status),
}

/// Serves the stream until a part of it ends or the caller cancels. Applies backpressure: nothing
/// is read from runtimes while the caller reads nothing.
pub(super) async fn serve(call: Call<'_>) {
    let Call { server, mut incoming, deadline, mut caller } = call;
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut incoming.head.headers);
    let mut all: SelectAll<BoxStream<'_, Item>> = SelectAll::new();
    // Subscribed first, so that no event is missed while runtimes open their streams.
    for backend in server.registry.decoded() {
        all.push(Box::pin(backend.events().map(|event| match event {
            Ok(message) => Item::Message(frame::encode(message).concat().into()),
            Err(status) => Item::End(StreamEnd::Status(status)),
        })));
    }
    for (_, upstream) in server.registry.raw() {
        all.push(Box::pin(runtime_events(upstream, &incoming.head, &incoming.body)));
    }
    // Ends the stream at a drain, which waits for all calls.
    all.push(Box::pin(stream::once(async {
        server.drain.cancelled().await;
        Item::End(StreamEnd::Status(Status::unavailable(
            "kiyot stops; the event stream can be opened again after its restart",
        )))
    })));
    // A runtime may send no head before its first event, so the first item of any part begins the
    // response.
    let (head, first) = match caller.wait(all.next()).await {
        Ok(Some(Item::Head(head))) => (head, Bytes::new()),
        Ok(Some(Item::Message(message))) => (grpc_head(), message),
        Ok(Some(Item::End(end))) => return refuse(caller, end),
        // Unreachable: the node backend's part always has an end.
        Ok(None) | Err(_) => return,
    };
    let Some(mut sink) = caller.send_response(&head, false) else { return };
    let mut message = first;
    loop {
        match sink.send(message).await {
            Ok(()) => {}
            Err(CopyError::SinkIdle(after)) => {
                tracing::debug!(?after, "caller left events unread");
                return sink.stream.send_reset(Reason::CANCEL);
            }
            Err(_) => return,
        }
        message = match wait(&mut sink, all.next()).await {
            Some(Some(Item::Head(_))) => Bytes::new(),
            Some(Some(Item::Message(message))) => message,
            Some(Some(Item::End(end))) => return finish(sink, end),
            Some(None) | None => return,
        };
    }
}

/// Drives `work` until it completes; `None` if the caller cancels.
async fn wait<F: Future>(sink: &mut CallerSink, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sink.stream.poll_reset(cx).map(|()| None),
    })
    .await
}

/// Ends a stream before its head was sent.
fn refuse(caller: Caller, end: StreamEnd) {
    match end {
        // The response is complete.
        StreamEnd::Head(head) => drop(caller.send_response(&head, true)),
        StreamEnd::Reset(reason) => caller.reset(reason),
        StreamEnd::Status(status) => caller.send_status(&status),
        StreamEnd::Trailers(trailers) => {
            if let Some(sink) = caller.send_response(&grpc_head(), false) {
                finish(sink, StreamEnd::Trailers(trailers));
            }
        }
    }
}

/// Ends a stream after its head was sent.
fn finish(mut sink: CallerSink, end: StreamEnd) {
    match end {
        StreamEnd::Head(mut head) => {
            head.headers.remove(CONTENT_TYPE);
            sink.end(Some(head.headers));
        }
        StreamEnd::Trailers(trailers) => sink.end(trailers),
        StreamEnd::Reset(reason) => sink.reset(reason),
        StreamEnd::Status(status) => finish_with_status(&mut sink, &status),
    }
}

/// State of a runtime's part of the stream.
enum RuntimeStream {
    /// Not requested yet.
    New,
    /// Open, with the received part of the next message.
    Open(RecvStream, BytesMut),
    Done,
}

/// Returns the events of a runtime. The last item is the end.
fn runtime_events<'a>(
    upstream: &'a Upstream,
    head: &'a request::Parts,
    body: &'a Bytes,
) -> impl futures::Stream<Item = Item> + Send + 'a {
    stream::unfold(RuntimeStream::New, move |part| async move {
        match part {
            RuntimeStream::New => match open(upstream, head, body).await {
                Err(end) => Some((Item::End(end), RuntimeStream::Done)),
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let ended = body.is_end_stream();
                    Some(if ended {
                        (Item::End(StreamEnd::Head(head)), RuntimeStream::Done)
                    } else {
                        (Item::Head(head), RuntimeStream::Open(body, BytesMut::new()))
                    })
                }
            },
            RuntimeStream::Open(mut body, mut received) => {
                match next_message(upstream, &mut body, &mut received).await {
                    Ok(message) => {
                        Some((Item::Message(message), RuntimeStream::Open(body, received)))
                    }
                    Err(end) => Some((Item::End(end), RuntimeStream::Done)),
                }
            }
            RuntimeStream::Done => None,
        }
    })
}

/// Opens the event stream of a runtime. Retries once if the runtime has not processed the call.
async fn open(
    upstream: &Upstream,
    head: &request::Parts,
    body: &Bytes,
) -> Result<Response<RecvStream>, StreamEnd> {
    let mut may_retry = true;
    loop {
        let sent = upstream
            .send(head, body, true)
            .await
            .map_err(|error| StreamEnd::Status(status_from_error(Code::Unavailable, &error)))?;
        match sent.response.await {
            Err(error) if error.is_retryable() && std::mem::take(&mut may_retry) => {}
            response => return response.map_err(|error| end_of_error(upstream, error)),
        }
    }
}

/// Returns the next message of a runtime, with its frame header.
async fn next_message(
    upstream: &Upstream,
    body: &mut RecvStream,
    received: &mut BytesMut,
) -> Result<Bytes, StreamEnd> {
    loop {
        match frame::parse(received) {
            Frame::Complete { length, compressed: false } => {
                return Ok(received.split_to(HEADER_BYTES + length).freeze());
            }
            Frame::Complete { compressed: true, .. } => {
                let message = "the container runtime's events can't be merged: they are \
                               compressed; allowed is the encoding identity";
                return Err(StreamEnd::Status(Status::internal(message)));
            }
            Frame::TooLarge(length) => return Err(StreamEnd::Status(too_large(length))),
            Frame::Partial => {}
        }
        match body.data().await {
            Some(part) => {
                let part = part.map_err(|error| end_of_error(upstream, error))?;
                // Bounded by a message and the HTTP/2 frame that ends it.
                received.extend_from_slice(&part);
            }
            None => {
                return Err(body
                    .trailers()
                    .await
                    .map_or_else(|error| end_of_error(upstream, error), StreamEnd::Trailers));
            }
        }
    }
}

fn end_of_error(upstream: &Upstream, error: Error) -> StreamEnd {
    match error.reset_reason() {
        Some(reason) => StreamEnd::Reset(reason),
        None => StreamEnd::Status(status_from_error(
            Code::Unavailable,
            &upstream.connection_lost(error),
        )),
    }
}
