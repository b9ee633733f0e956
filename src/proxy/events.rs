//! The stream of container events: those of all container runtimes, byte for byte, and those of the
//! other backends between them, in whole messages.
//!
//! The kubelet takes the stream for the whole truth. So there is one only if every runtime has one,
//! and it ends as soon as a part of it ends, in that part's words: then the kubelet lists all, and
//! opens it again or goes back to listing.

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
    caller::{Caller, GRPC_ACCEPT_ENCODING, finish_with_status, grpc_head, status_from_error},
    copy_body::{CallerSink, CopyError},
    deadline::Deadline,
    decoded::too_large,
    frame::{self, Frame, HEADER_BYTES},
    incoming::Incoming,
    server_state::ServerState,
};
use crate::backends::cri::Upstream;

/// What a part of the stream has next.
enum Item {
    /// The metadata of an answer that has begun.
    Head(response::Parts),
    /// A whole message with its head.
    Message(Bytes),
    /// The end.
    End(StreamEnd),
}

/// How the stream ends.
enum StreamEnd {
    /// An answer without any message: its metadata has the status.
    Head(response::Parts),
    Trailers(Option<HeaderMap>),
    Reset(Reason),
    Status(Status),
}

/// Serves the stream until a part of it ends or the caller goes. While the caller takes nothing,
/// nothing is taken from the runtimes.
pub(super) async fn serve(
    server: &ServerState,
    mut incoming: Incoming,
    deadline: Deadline,
    mut caller: Caller,
) {
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    deadline.write_remaining(&mut incoming.head.headers);
    let mut all: SelectAll<BoxStream<'_, Item>> = SelectAll::new();
    // First, so that nothing is missed that happens while the runtimes begin.
    for backend in server.registry.decoded() {
        all.push(Box::pin(backend.events().map(|event| match event {
            Ok(message) => Item::Message(frame::encode(message).concat().into()),
            Err(status) => Item::End(StreamEnd::Status(status)),
        })));
    }
    for (_, upstream) in server.registry.raw() {
        all.push(Box::pin(runtime_events(upstream, &incoming.head, &incoming.body)));
    }
    // It has no end of its own, and the daemon's stop need not wait for it.
    all.push(Box::pin(stream::once(async {
        server.drain.cancelled().await;
        Item::End(StreamEnd::Status(Status::unavailable(
            "kiyot stops; the stream of events can be opened again when it is back",
        )))
    })));
    // A runtime may send no metadata before its first event: the first of any of them begins the
    // answer.
    let (head, first) = match caller.wait(all.next()).await {
        Ok(Some(Item::Head(head))) => (head, Bytes::new()),
        Ok(Some(Item::Message(message))) => (grpc_head(), message),
        Ok(Some(Item::End(end))) => return refuse(caller, end),
        // There is always a runtime, and its part has an end.
        Ok(None) | Err(_) => return,
    };
    let Some(mut sink) = caller.send_response(&head, false) else { return };
    let mut message = first;
    loop {
        match sink.send(message).await {
            Ok(()) => {}
            Err(CopyError::SinkIdle(after)) => {
                tracing::debug!(?after, "a reader of events left them unread");
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

/// Waits for something as long as the reader is there; `None` if it has gone.
async fn wait<F: Future>(sink: &mut CallerSink, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sink.stream.poll_reset(cx).map(|()| None),
    })
    .await
}

/// Ends a stream that has not begun.
fn refuse(caller: Caller, end: StreamEnd) {
    match end {
        // All of the answer: there is nothing to be sent after it.
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

/// Ends a stream that has begun.
fn finish(mut sink: CallerSink, end: StreamEnd) {
    match end {
        StreamEnd::Head(mut head) => {
            head.headers.remove(CONTENT_TYPE);
            sink.stream.finish(Some(head.headers));
        }
        StreamEnd::Trailers(trailers) => sink.stream.finish(trailers),
        StreamEnd::Reset(reason) => sink.stream.send_reset(reason),
        StreamEnd::Status(status) => finish_with_status(&mut sink.stream, &status),
    }
}

/// Where a runtime's part is.
enum RuntimeStream {
    /// It is to be asked.
    New,
    /// It sends; what came of the next message.
    Open(RecvStream, BytesMut),
    Done,
}

/// The events of a runtime. The last that it has is an end.
fn runtime_events<'a>(
    upstream: &'a Upstream,
    head: &'a request::Parts,
    body: &'a Bytes,
) -> impl futures::Stream<Item = Item> + Send + 'a {
    stream::unfold(RuntimeStream::New, move |part| async move {
        match part {
            RuntimeStream::New => match open(upstream, head, body).await {
                Err(end) => Some((Item::End(end), RuntimeStream::Done)),
                Ok(answer) => {
                    let (head, body) = answer.into_parts();
                    let ended = body.is_end_stream();
                    Some(if ended {
                        (Item::End(StreamEnd::Head(head)), RuntimeStream::Done)
                    } else {
                        (Item::Head(head), RuntimeStream::Open(body, BytesMut::new()))
                    })
                }
            },
            RuntimeStream::Open(mut body, mut came) => {
                match next_message(upstream, &mut body, &mut came).await {
                    Ok(message) => Some((Item::Message(message), RuntimeStream::Open(body, came))),
                    Err(end) => Some((Item::End(end), RuntimeStream::Done)),
                }
            }
            RuntimeStream::Done => None,
        }
    })
}

/// Asks a runtime for its events. A call that it refused to begin with is sent once more.
async fn open(
    upstream: &Upstream,
    head: &request::Parts,
    body: &Bytes,
) -> Result<Response<RecvStream>, StreamEnd> {
    let mut again = true;
    loop {
        let sent = upstream
            .send(head, body, true)
            .await
            .map_err(|error| StreamEnd::Status(status_from_error(Code::Unavailable, &error)))?;
        match sent.response.await {
            Err(error) if error.is_retryable() && std::mem::take(&mut again) => {}
            answer => return answer.map_err(|error| end_of_error(upstream, error)),
        }
    }
}

/// The next message of a runtime, with its head.
async fn next_message(
    upstream: &Upstream,
    body: &mut RecvStream,
    came: &mut BytesMut,
) -> Result<Bytes, StreamEnd> {
    loop {
        match frame::parse(came) {
            Frame::Complete { length, compressed: false } => {
                return Ok(came.split_to(HEADER_BYTES + length).freeze());
            }
            Frame::Complete { compressed: true, .. } => {
                let message = "the container runtime's events can't be merged: they are compressed, though uncompressed ones were asked for";
                return Err(StreamEnd::Status(Status::internal(message)));
            }
            Frame::TooLarge(length) => return Err(StreamEnd::Status(too_large(length))),
            Frame::Partial => {}
        }
        match body.data().await {
            Some(part) => {
                let part = part.map_err(|error| end_of_error(upstream, error))?;
                // What is kept here is a message at most, and what came with its end.
                came.extend_from_slice(&part);
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
