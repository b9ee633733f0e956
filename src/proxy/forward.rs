//! Raw forwarding: data is copied in both directions until a side ends the call.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::Response;
use kiyot_http2::{Error, Reason, RecvStream, SendStream, client::ResponseFuture};
use tonic::{Code, Status};

use super::{
    call::Call,
    caller::{Caller, finish_with_status, status_from_error},
    cell_guard::CellGuard,
    copy_body::{CopyBody, CopyError},
};
use crate::backends::cri::{Upstream, UpstreamCall};

/// Forwards a call. Dropping the future cancels the call at the runtime.
pub(super) async fn forward(upstream: &Upstream, call: Call<'_>) {
    let Call { mut incoming, deadline, mut caller, .. } = call;
    let mut may_retry = true;
    loop {
        deadline.write_remaining(&mut incoming.head.headers);
        let Ok(sent) = caller
            .wait(upstream.send(&incoming.head, &incoming.body, incoming.rest.is_none()))
            .await
        else {
            return;
        };
        let UpstreamCall { mut response, stream } = match sent {
            Ok(sent) => sent,
            Err(error) => return caller.send_status(&status_from_error(Code::Unavailable, &error)),
        };
        let mut upload = Upload::new(
            incoming.rest.take().map(|rest| CopyBody::new(rest, stream, incoming.idle_timeout)),
            incoming.guard.take(),
        );
        match wait_for_response(&mut upload, &mut response, &mut caller).await {
            Outcome::Cancelled => return,
            Outcome::Failed(status) => return caller.send_status(&status),
            Outcome::Response(Err(error))
                if may_retry && error.is_retryable() && !upload.has_sent() =>
            {
                may_retry = false;
                // The first attempt has not read the rest of the request, which the retry sends.
                incoming.rest = upload.copy.map(|copy| copy.from);
                incoming.guard = upload.guard;
            }
            Outcome::Response(Err(error)) => return failed(upstream, caller, error),
            Outcome::Response(Ok(response)) => {
                return copy_response(upstream, upload, response, caller).await;
            }
        }
    }
}

/// Copying of the rest of a request.
struct Upload {
    copy: Option<CopyBody<SendStream>>,
    /// Holds back the beginning, until it may be copied.
    guard: Option<Box<CellGuard>>,
    /// All was sent, or the runtime has closed its stream.
    is_over: bool,
}

impl Upload {
    fn new(copy: Option<CopyBody<SendStream>>, guard: Option<Box<CellGuard>>) -> Self {
        Self { is_over: copy.is_none(), copy, guard }
    }

    /// Returns whether data was sent that a retry can't send again.
    fn has_sent(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.has_sent)
    }

    /// Copies available data. Returns only errors of the caller's side.
    fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), CopyError> {
        let Some(copy) = self.copy.as_mut().filter(|_| !self.is_over) else { return Ok(()) };
        if let Some(guard) = &mut self.guard {
            let Poll::Ready(held) = guard.poll(&mut copy.from, cx) else { return Ok(()) };
            copy.begin_with(held?);
            self.guard = None;
        }
        match copy.poll(cx) {
            Poll::Pending => Ok(()),
            // The response says why the runtime has closed its stream.
            Poll::Ready(Ok(()) | Err(CopyError::SinkClosed | CopyError::SinkIdle(_))) => {
                self.is_over = true;
                Ok(())
            }
            Poll::Ready(Err(error)) => Err(error),
        }
    }
}

enum Outcome {
    Response(Result<Response<RecvStream>, Error>),
    Cancelled,
    Failed(Status),
}

/// Copies the request until the response begins.
async fn wait_for_response(
    upload: &mut Upload,
    response: &mut ResponseFuture,
    caller: &mut Caller,
) -> Outcome {
    poll_fn(|cx| {
        match upload.poll(cx) {
            Ok(()) => {}
            Err(CopyError::SourceIdle(after)) => {
                return Poll::Ready(Outcome::Failed(request_idle(after)));
            }
            Err(CopyError::Refused(status)) => return Poll::Ready(Outcome::Failed(status)),
            Err(_) => return Poll::Ready(Outcome::Cancelled),
        }
        if let Poll::Ready(response) = Pin::new(&mut *response).poll(cx) {
            return Poll::Ready(Outcome::Response(response));
        }
        caller.poll_gone(cx).map(|_| Outcome::Cancelled)
    })
    .await
}

/// Copies the response to the caller, with the rest of the request.
async fn copy_response(
    upstream: &Upstream,
    mut upload: Upload,
    response: Response<RecvStream>,
    caller: Caller,
) {
    let (head, body) = response.into_parts();
    let Some(sink) = caller.send_response(&head, body.is_end_stream()) else { return };
    let mut download = CopyBody::new(body, sink, None);
    let result = poll_fn(|cx| {
        match upload.poll(cx) {
            // Drops the rest of the request, so that the caller stops sending it.
            Ok(()) if upload.is_over => upload.copy = None,
            Ok(()) => {}
            // The caller has cancelled.
            Err(CopyError::Source(_)) => return Poll::Ready(Err(CopyError::SinkClosed)),
            Err(error) => return Poll::Ready(Err(error)),
        }
        match download.poll(cx) {
            Poll::Pending => download.to.stream.poll_reset(cx).map(|()| Err(CopyError::SinkClosed)),
            ready => ready,
        }
    })
    .await;
    match result {
        Ok(()) | Err(CopyError::SinkClosed) => {}
        Err(CopyError::Source(error)) => match error.reset_reason() {
            Some(reason) => download.to.reset(reason),
            None => finish_with_status(
                &mut download.to,
                &status_from_error(Code::Unavailable, &upstream.connection_lost(error)),
            ),
        },
        Err(CopyError::SourceIdle(after)) => {
            finish_with_status(&mut download.to, &request_idle(after))
        }
        Err(CopyError::Refused(status)) => finish_with_status(&mut download.to, &status),
        Err(CopyError::SinkIdle(after)) => {
            tracing::debug!(?after, "caller left its response unread");
            download.to.stream.send_reset(Reason::CANCEL);
        }
    }
}

/// Returns the status of a call whose caller left its request incomplete.
pub(super) fn request_idle(after: Duration) -> Status {
    Status::deadline_exceeded(format!("the request was incomplete for {after:?}"))
}

fn failed(upstream: &Upstream, caller: Caller, error: Error) {
    match error.reset_reason() {
        Some(reason) => caller.reset(reason),
        None => caller
            .send_status(&status_from_error(Code::Unavailable, &upstream.connection_lost(error))),
    }
}
