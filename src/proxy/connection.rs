//! One connection of a client, with all its calls, in one task: what the calls of a round send leaves in one write.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, stream::FuturesUnordered};
use h2::{
    Reason,
    server::{Builder, Connection},
};
use tokio::{
    net::UnixStream,
    sync::watch,
    time::{Sleep, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    call,
    knock::Knock,
    shared::{Settings, Shared},
};
use crate::backends::cri::{CONNECTION_WINDOW, MAX_HEADER_LIST, RESET_STREAM_DURATION, RESET_STREAMS, STREAM_WINDOW, Tap, Wire};

/// How long the last words of a connection may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// How often h2 and the calls are polled in one round at most, before other tasks have their turn. A call that comes takes three turns, its answer two.
const TURNS: usize = 8;

/// How the daemon is told to stop.
#[derive(Debug, Clone, Default)]
pub(super) struct Stop {
    /// No new calls.
    pub(super) drain: CancellationToken,
    /// No calls at all.
    pub(super) reset: CancellationToken,
}

/// Serves a connection until it ends.
pub(super) async fn serve(stream: UnixStream, front: Arc<Shared>, mut settings: watch::Receiver<Arc<Settings>>, stop: Stop) {
    let (wire, tap) = match Wire::of_server(stream) {
        Ok(ends) => ends,
        Err(error) => return tracing::warn!(%error, "a client's connection can't be served"),
    };
    let begin = Arc::clone(&settings.borrow_and_update());
    // It is told once; what is set later counts all the same, by calls that are refused.
    let streams = u32::try_from(begin.max_calls).unwrap_or(u32::MAX);
    let mut builder = Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_LIST)
        .max_concurrent_streams(streams)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_STREAM_DURATION)
        // A client may well begin calls and cancel them before they are looked at.
        .max_pending_accept_reset_streams(RESET_STREAMS);
    let handshake = tokio::select! {
        biased;
        () = stop.drain.cancelled() => return,
        handshake = timeout(begin.client_timeout, builder.handshake::<_, Bytes>(wire)) => handshake,
    };
    let mut h2 = match handshake {
        Ok(Ok(h2)) => h2,
        Ok(Err(error)) => return tracing::debug!(%error, "a client does not speak HTTP/2"),
        Err(_) => return tracing::debug!(after = ?begin.client_timeout, "a client connected and said nothing"),
    };
    tap.drive();
    match rounds(&mut h2, &tap, &front, settings, &stop).await {
        End::Closed => {}
        End::Error(error) => tracing::debug!(%error, "a client's connection ended"),
        End::HalfSent => {
            tracing::debug!(after = ?begin.client_timeout, "a client stopped in the middle of a frame");
            say_goodbye(&mut h2, &tap, Reason::ENHANCE_YOUR_CALM).await;
        }
        End::Reset => say_goodbye(&mut h2, &tap, Reason::NO_ERROR).await,
    }
}

enum End {
    Closed,
    Error(h2::Error),
    HalfSent,
    Reset,
}

/// Accepts calls and serves them. When it returns, the calls that were open are no more.
async fn rounds(h2: &mut Connection<Wire, Bytes>, tap: &Tap, front: &Arc<Shared>, mut settings: watch::Receiver<Arc<Settings>>, stop: &Stop) -> End {
    let mut now = Arc::clone(&settings.borrow_and_update());
    let mut calls = FuturesUnordered::new();
    let mut quiet = Quiet { limit: now.client_timeout, timer: None, frames: 0 };
    let mut drain = pin!(stop.drain.cancelled());
    let mut reset = pin!(stop.reset.cancelled());
    let mut draining = false;
    let (of_h2, of_calls) = (Knock::new(), Knock::new());
    poll_fn(|cx| {
        of_h2.begin(cx);
        of_calls.begin(cx);
        if !draining && drain.as_mut().poll(cx).is_ready() {
            draining = true;
            h2.graceful_shutdown();
            of_h2.waker.wake_by_ref();
        }
        if draining && reset.as_mut().poll(cx).is_ready() {
            return Poll::Ready(End::Reset);
        }
        let (mut h2_cx, mut calls_cx) = (Context::from_waker(&of_h2.waker), Context::from_waker(&of_calls.waker));
        for _ in 0..TURNS {
            // Calls first: what they send is then written by h2 in the same turn.
            let turn_of_calls = of_calls.take();
            if turn_of_calls {
                while let Poll::Ready(Some(())) = calls.poll_next_unpin(&mut calls_cx) {}
            }
            let turn_of_h2 = of_h2.take();
            if !turn_of_calls && !turn_of_h2 {
                break;
            }
            if !turn_of_h2 {
                continue;
            }
            loop {
                match h2.poll_accept(&mut h2_cx) {
                    Poll::Ready(Some(Ok((request, respond)))) => {
                        // An atomic load; the lock is taken only after a reload.
                        if settings.has_changed().unwrap_or(false) {
                            now = Arc::clone(&settings.borrow_and_update());
                            quiet.limit = now.client_timeout;
                        }
                        calls.push(call::serve(front.clone(), now.clone(), request, respond));
                        of_calls.waker.wake_by_ref();
                    }
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(End::Error(error)),
                    Poll::Ready(None) => return Poll::Ready(End::Closed),
                    Poll::Pending => break,
                }
            }
        }
        // It is h2 that waits for room as well.
        if let Poll::Ready(Err(error)) = tap.poll_flush(&mut h2_cx) {
            tracing::debug!(%error, "a client can't be written to");
            return Poll::Ready(End::Closed);
        }
        let (h2_waits, calls_wait) = (of_h2.end(), of_calls.end());
        if h2_waits || calls_wait {
            cx.waker().wake_by_ref();
        }
        if quiet.poll(cx, tap).is_ready() { Poll::Ready(End::HalfSent) } else { Poll::Pending }
    })
    .await
}

/// Sends GOAWAY, and what calls had sent last.
async fn say_goodbye(h2: &mut Connection<Wire, Bytes>, tap: &Tap, reason: Reason) {
    h2.abrupt_shutdown(reason);
    let end = poll_fn(|cx| {
        let closed = h2.poll_closed(cx);
        match tap.poll_flush(cx) {
            Poll::Ready(Ok(())) => closed.map(drop),
            Poll::Ready(Err(_)) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    });
    // A client that does not read is left without.
    let _ = timeout(FAREWELL, end).await;
}

/// Notices a client that stopped in the middle of a frame. One that stopped between frames may stay as long as it likes.
struct Quiet {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    frames: u64,
}

impl Quiet {
    fn poll(&mut self, cx: &mut Context<'_>, tap: &Tap) -> Poll<()> {
        loop {
            let Some(timer) = &mut self.timer else {
                if tap.is_between_frames() {
                    return Poll::Pending;
                }
                self.frames = tap.frames();
                self.timer = Some(Box::pin(sleep(self.limit)));
                continue;
            };
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.timer = None;
            if !tap.is_between_frames() && self.frames == tap.frames() {
                return Poll::Ready(());
            }
        }
    }
}
