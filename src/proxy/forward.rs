//! Raw forwarding: what comes is passed on, in both directions, until one side ends it.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::Response;
use tonic::{Code, Status};

use super::{
    caller::{Caller, end_with, status_of},
    incoming::Incoming,
    pump::{Broken, Pump},
    timeout::Budget,
};
use crate::{
    backends::cri::{Sent, Upstream},
    http2::{Answering, Error, Reason, Receiving, Sending},
};

/// Forwards a call. Dropping the future cancels it on the other side.
pub(super) async fn forward(
    upstream: &Upstream,
    mut incoming: Incoming,
    budget: Budget,
    mut caller: Caller,
) {
    let mut again = true;
    loop {
        budget.shorten(&mut incoming.head.headers);
        let Ok(sent) = caller
            .wait(upstream.send(&incoming.head, &incoming.body, incoming.rest.is_none()))
            .await
        else {
            return;
        };
        let Sent { mut response, stream } = match sent {
            Ok(sent) => sent,
            Err(error) => return caller.status(&status_of(Code::Unavailable, &error)),
        };
        let mut upload =
            Upload::new(incoming.rest.take().map(|rest| Pump::new(rest, stream, incoming.limit)));
        match head(&mut upload, &mut response, &mut caller).await {
            Head::Cancelled => return,
            Head::Failed(status) => return caller.status(&status),
            Head::Answer(Err(error)) if again && error.was_refused() && !upload.has_passed() => {
                again = false;
                // What had not come of the request comes still, though this try ended first.
                incoming.rest = upload.pump.map(|pump| pump.from);
            }
            Head::Answer(Err(error)) => return failed(upstream, caller, error),
            Head::Answer(Ok(response)) => return answer(upstream, upload, response, caller).await,
        }
    }
}

/// What is still to be sent of the request.
struct Upload {
    pump: Option<Pump<Sending>>,
    /// All was sent, or the runtime wants no more.
    is_over: bool,
}

impl Upload {
    fn new(pump: Option<Pump<Sending>>) -> Self {
        Self { is_over: pump.is_none(), pump }
    }

    /// Whether a part of the request that is kept no more was sent.
    fn has_passed(&self) -> bool {
        self.pump.as_ref().is_some_and(|pump| pump.has_passed)
    }

    /// Sends on. An error is the caller's.
    fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), Broken> {
        let Some(pump) = self.pump.as_mut().filter(|_| !self.is_over) else { return Ok(()) };
        match pump.poll(cx) {
            Poll::Pending => Ok(()),
            // The answer says why the runtime wants no more.
            Poll::Ready(Ok(()) | Err(Broken::Sink | Broken::SinkStalled(_))) => {
                self.is_over = true;
                Ok(())
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }
}

enum Head {
    Answer(Result<Response<Receiving>, Error>),
    Cancelled,
    Failed(Status),
}

/// Waits for the answer to begin.
async fn head(upload: &mut Upload, response: &mut Answering, caller: &mut Caller) -> Head {
    poll_fn(|cx| {
        match upload.poll(cx) {
            Ok(()) => {}
            Err(Broken::SourceStalled(after)) => {
                return Poll::Ready(Head::Failed(half_sent(after)));
            }
            Err(_) => return Poll::Ready(Head::Cancelled),
        }
        if let Poll::Ready(answer) = Pin::new(&mut *response).poll(cx) {
            return Poll::Ready(Head::Answer(answer));
        }
        caller.poll_gone(cx).map(|_| Head::Cancelled)
    })
    .await
}

/// Passes the answer on.
async fn answer(
    upstream: &Upstream,
    mut upload: Upload,
    response: Response<Receiving>,
    caller: Caller,
) {
    let (head, body) = response.into_parts();
    let Some(sink) = caller.begin(&head, body.is_end()) else { return };
    let mut download = Pump::new(body, sink, None);
    let result = poll_fn(|cx| {
        match upload.poll(cx) {
            // Nobody will want the rest any more.
            Ok(()) if upload.is_over => upload.pump = None,
            Ok(()) => {}
            // It is the caller that has gone.
            Err(Broken::Source(_)) => return Poll::Ready(Err(Broken::Sink)),
            Err(error) => return Poll::Ready(Err(error)),
        }
        match download.poll(cx) {
            Poll::Pending => download.to.stream.poll_gone(cx).map(|()| Err(Broken::Sink)),
            ready => ready,
        }
    })
    .await;
    match result {
        Ok(()) | Err(Broken::Sink) => {}
        Err(Broken::Source(error)) => match error.reset() {
            Some(reason) => download.to.stream.reset(reason),
            None => end_with(
                &mut download.to.stream,
                &status_of(Code::Unavailable, &upstream.lost(error)),
            ),
        },
        Err(Broken::SourceStalled(after)) => end_with(&mut download.to.stream, &half_sent(after)),
        Err(Broken::SinkStalled(after)) => {
            tracing::debug!(?after, "a caller left its answer unread");
            download.to.stream.reset(Reason::CANCEL);
        }
    }
}

/// The status of a call whose caller stopped in the middle of its request.
pub(super) fn half_sent(after: Duration) -> Status {
    Status::deadline_exceeded(format!("the rest of the request did not come within {after:?}"))
}

fn failed(upstream: &Upstream, caller: Caller, error: Error) {
    match error.reset() {
        Some(reason) => caller.reset(reason),
        None => caller.status(&status_of(Code::Unavailable, &upstream.lost(error))),
    }
}
