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
use tonic::{Code, Status};

use super::{
    caller::{Caller, GRPC_ACCEPT_ENCODING, end_with, plain_head, status_of},
    decoded::too_large,
    frame::{self, Body, HEAD},
    incoming::Incoming,
    pump::{Broken, Sink},
    shared::Shared,
    timeout::Budget,
};
use crate::{
    backends::cri::Upstream,
    http2::{Error, Reason, Receiving},
};

/// What a part of the stream has next.
enum Next {
    /// The metadata of an answer that has begun.
    Head(response::Parts),
    /// A whole message with its head.
    Message(Bytes),
    /// The end.
    End(End),
}

/// How the stream ends.
enum End {
    /// An answer without any message: its metadata has the status.
    Head(response::Parts),
    Trailers(Option<HeaderMap>),
    Reset(Reason),
    Status(Status),
}

/// Serves the stream until a part of it ends or the caller goes. While the caller takes nothing,
/// nothing is taken from the runtimes.
pub(super) async fn serve(
    front: &Shared,
    mut incoming: Incoming,
    budget: Budget,
    mut caller: Caller,
) {
    incoming.head.headers.remove(GRPC_ACCEPT_ENCODING);
    budget.shorten(&mut incoming.head.headers);
    let mut all: SelectAll<BoxStream<'_, Next>> = SelectAll::new();
    // First, so that nothing is missed that happens while the runtimes begin.
    for backend in front.registry.decoded() {
        all.push(Box::pin(backend.events().map(|event| match event {
            Ok(message) => Next::Message(frame::framed(message).concat().into()),
            Err(status) => Next::End(End::Status(status)),
        })));
    }
    for (_, upstream) in front.registry.raw() {
        all.push(Box::pin(of_runtime(upstream, &incoming.head, &incoming.body)));
    }
    // It has no end of its own, and the daemon's stop need not wait for it.
    all.push(Box::pin(stream::once(async {
        front.drain.cancelled().await;
        Next::End(End::Status(Status::unavailable(
            "kiyot stops; the stream of events can be opened again when it is back",
        )))
    })));
    // A runtime may send no metadata before its first event: the first of any of them begins the
    // answer.
    let (head, first) = match caller.wait(all.next()).await {
        Ok(Some(Next::Head(head))) => (head, Bytes::new()),
        Ok(Some(Next::Message(message))) => (plain_head(), message),
        Ok(Some(Next::End(end))) => return refuse(caller, end),
        // There is always a runtime, and its part has an end.
        Ok(None) | Err(_) => return,
    };
    let Some(mut sink) = caller.begin(&head, false) else { return };
    let mut message = first;
    loop {
        match sink.send(message).await {
            Ok(()) => {}
            Err(Broken::SinkStalled(after)) => {
                tracing::debug!(?after, "a reader of events left them unread");
                return sink.stream.reset(Reason::CANCEL);
            }
            Err(_) => return,
        }
        message = match wait(&mut sink, all.next()).await {
            Some(Some(Next::Head(_))) => Bytes::new(),
            Some(Some(Next::Message(message))) => message,
            Some(Some(Next::End(end))) => return finish(sink, end),
            Some(None) | None => return,
        };
    }
}

/// Waits for something as long as the reader is there; `None` if it has gone.
async fn wait<F: Future>(sink: &mut Sink, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sink.stream.poll_gone(cx).map(|()| None),
    })
    .await
}

/// Ends a stream that has not begun.
fn refuse(caller: Caller, end: End) {
    match end {
        // All of the answer: there is nothing to be sent after it.
        End::Head(head) => drop(caller.begin(&head, true)),
        End::Reset(reason) => caller.reset(reason),
        End::Status(status) => caller.status(&status),
        End::Trailers(trailers) => {
            if let Some(sink) = caller.begin(&plain_head(), false) {
                finish(sink, End::Trailers(trailers));
            }
        }
    }
}

/// Ends a stream that has begun.
fn finish(mut sink: Sink, end: End) {
    match end {
        End::Head(mut head) => {
            head.headers.remove(CONTENT_TYPE);
            sink.stream.end(Some(head.headers));
        }
        End::Trailers(trailers) => sink.stream.end(trailers),
        End::Reset(reason) => sink.stream.reset(reason),
        End::Status(status) => end_with(&mut sink.stream, &status),
    }
}

/// Where a runtime's part is.
enum Part {
    /// It is to be asked.
    New,
    /// It sends; what came of the next message.
    Open(Receiving, BytesMut),
    Over,
}

/// The events of a runtime. The last that it has is an end.
fn of_runtime<'a>(
    upstream: &'a Upstream,
    head: &'a request::Parts,
    body: &'a Bytes,
) -> impl futures::Stream<Item = Next> + Send + 'a {
    stream::unfold(Part::New, move |part| async move {
        match part {
            Part::New => match begin(upstream, head, body).await {
                Err(end) => Some((Next::End(end), Part::Over)),
                Ok(answer) => {
                    let (head, body) = answer.into_parts();
                    let ended = body.is_end();
                    Some(if ended {
                        (Next::End(End::Head(head)), Part::Over)
                    } else {
                        (Next::Head(head), Part::Open(body, BytesMut::new()))
                    })
                }
            },
            Part::Open(mut body, mut came) => match message(upstream, &mut body, &mut came).await {
                Ok(message) => Some((Next::Message(message), Part::Open(body, came))),
                Err(end) => Some((Next::End(end), Part::Over)),
            },
            Part::Over => None,
        }
    })
}

/// Asks a runtime for its events. A call that it refused to begin with is sent once more.
async fn begin(
    upstream: &Upstream,
    head: &request::Parts,
    body: &Bytes,
) -> Result<Response<Receiving>, End> {
    let mut again = true;
    loop {
        let sent = upstream
            .send(head, body, true)
            .await
            .map_err(|error| End::Status(status_of(Code::Unavailable, &error)))?;
        match sent.response.await {
            Err(error) if error.was_refused() && std::mem::take(&mut again) => {}
            answer => return answer.map_err(|error| broken(upstream, error)),
        }
    }
}

/// The next message of a runtime, with its head.
async fn message(
    upstream: &Upstream,
    body: &mut Receiving,
    came: &mut BytesMut,
) -> Result<Bytes, End> {
    loop {
        match frame::look(came) {
            Body::Whole { length, compressed: false } => {
                return Ok(came.split_to(HEAD + length).freeze());
            }
            Body::Whole { compressed: true, .. } => {
                let message = "the container runtime's events can't be merged: they are compressed, though uncompressed ones were asked for";
                return Err(End::Status(Status::internal(message)));
            }
            Body::TooLarge(length) => return Err(End::Status(too_large(length))),
            Body::Part => {}
        }
        match body.data().await {
            Some(part) => {
                let part = part.map_err(|error| broken(upstream, error))?;
                // What is kept here is a message at most, and what came with its end.
                came.extend_from_slice(&part);
            }
            None => {
                return Err(body
                    .trailers()
                    .await
                    .map_or_else(|error| broken(upstream, error), End::Trailers));
            }
        }
    }
}

fn broken(upstream: &Upstream, error: Error) -> End {
    match error.reset() {
        Some(reason) => End::Reset(reason),
        None => End::Status(status_of(Code::Unavailable, &upstream.lost(error))),
    }
}
