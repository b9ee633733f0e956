//! A client's connection. One task serves it with all its calls, so that one write sends all data
//! of a round.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use kiyot_http2::{Error, Reason, server};
use tokio::{
    net::UnixStream,
    sync::watch,
    time::{Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    serve,
    server_state::{ServerState, Settings},
};

mod child_waker;

use child_waker::ChildWaker;

/// Bound on the reads and polls of a round, after which other tasks run. A request takes one poll,
/// its response another.
const MAX_POLLS_PER_ROUND: usize = 8;

/// Tokens that stop the server.
#[derive(Debug, Clone, Default)]
pub(super) struct Shutdown {
    /// Cancelled to accept no new calls.
    pub(super) drain: CancellationToken,
    /// Cancelled to end all calls.
    pub(super) reset: CancellationToken,
}

/// Serves a connection until it ends.
pub(super) async fn serve(
    stream: UnixStream,
    server: Arc<ServerState>,
    mut settings: watch::Receiver<Arc<Settings>>,
    shutdown: Shutdown,
) {
    let begin = Arc::clone(&settings.borrow_and_update());
    let mut serving = match server::handshake(stream, max_streams(&begin)) {
        Ok(serving) => serving,
        Err(error) => return tracing::warn!(%error, "client connection refused"),
    };
    match run(&mut serving, &server, begin, settings, &shutdown).await {
        ConnectionEnd::Closed => {}
        ConnectionEnd::Error(error) => {
            tracing::debug!(%error, "client connection failed");
            serving.flush().await;
        }
        ConnectionEnd::FrameTimeout(after) if serving.has_received_settings() => {
            tracing::debug!(?after, "client left a frame incomplete");
            serving
                .abrupt_shutdown(Reason::ENHANCE_YOUR_CALM, "a frame stopped in its middle")
                .await;
        }
        ConnectionEnd::FrameTimeout(after) => {
            tracing::debug!(?after, "client sent no preface")
        }
        ConnectionEnd::Reset => serving.abrupt_shutdown(Reason::NO_ERROR, "the daemon stops").await,
    }
}

/// Returns the limit on streams to announce. If a reload lowers the limit, the calls above it are
/// refused.
fn max_streams(settings: &Settings) -> u32 {
    u32::try_from(settings.max_calls).unwrap_or(u32::MAX)
}

enum ConnectionEnd {
    Closed,
    Error(Error),
    FrameTimeout(Duration),
    Reset,
}

/// Accepts calls and serves them. Open calls are dropped when it returns.
async fn run(
    serving: &mut server::Connection,
    server: &Arc<ServerState>,
    mut now: Arc<Settings>,
    mut settings: watch::Receiver<Arc<Settings>>,
    shutdown: &Shutdown,
) -> ConnectionEnd {
    let mut calls = FuturesUnordered::new();
    let mut frame_timeout = FrameTimeout { limit: now.client_timeout, timer: None, frames: 0 };
    let mut drain = pin!(shutdown.drain.cancelled());
    let mut reset = pin!(shutdown.reset.cancelled());
    let mut draining = false;
    let calls_waker = ChildWaker::new();
    poll_fn(|cx| {
        calls_waker.begin_round(cx);
        if !draining && drain.as_mut().poll(cx).is_ready() {
            draining = true;
            if !serving.has_received_settings() {
                return Poll::Ready(ConnectionEnd::Closed);
            }
            serving.graceful_shutdown();
        }
        if draining && reset.as_mut().poll(cx).is_ready() {
            return Poll::Ready(ConnectionEnd::Reset);
        }
        // An atomic load. The lock is taken only after a reload.
        if settings.has_changed().unwrap_or(false) {
            now = Arc::clone(&settings.borrow_and_update());
            frame_timeout.limit = now.client_timeout;
            serving.raise_max_concurrent_streams(max_streams(&now));
        }
        let mut calls_cx = Context::from_waker(&calls_waker.waker);
        let mut has_read = false;
        for _ in 0..MAX_POLLS_PER_ROUND {
            has_read = match serving.poll_read(cx) {
                Poll::Ready(Ok(true)) => true,
                Poll::Ready(Ok(false)) => return Poll::Ready(ConnectionEnd::Closed),
                Poll::Ready(Err(error)) => return Poll::Ready(ConnectionEnd::Error(error)),
                Poll::Pending => false,
            };
            while let Some((request, respond)) = serving.accept() {
                calls.push(serve::serve(server.clone(), now.clone(), request, respond));
                calls_waker.waker.wake_by_ref();
            }
            let turn_of_calls = calls_waker.take_wake();
            if turn_of_calls {
                while let Poll::Ready(Some(())) = calls.poll_next_unpin(&mut calls_cx) {}
            }
            if !turn_of_calls && !has_read {
                break;
            }
        }
        let could_read = serving.may_read();
        match serving.poll_write(cx) {
            Poll::Ready(Err(error)) => {
                tracing::debug!(%error, "write to client failed");
                return Poll::Ready(ConnectionEnd::Closed);
            }
            Poll::Ready(Ok(())) if serving.is_done() => return Poll::Ready(ConnectionEnd::Closed),
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        // No waker fires for data that became readable or stayed unread within the round, or for
        // calls that were woken within the round.
        let can_read_again = !could_read && serving.may_read();
        let calls_wait = calls_waker.end_round();
        if has_read || can_read_again || calls_wait {
            cx.waker().wake_by_ref();
        }
        if frame_timeout.poll(cx, serving).is_ready() {
            Poll::Ready(ConnectionEnd::FrameTimeout(frame_timeout.limit))
        } else {
            Poll::Pending
        }
    })
    .await
}

/// Timeout of a client that leaves a frame incomplete. Between frames a client may be idle without
/// a limit.
struct FrameTimeout {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    frames: u64,
}

impl FrameTimeout {
    fn poll(&mut self, cx: &mut Context<'_>, serving: &server::Connection) -> Poll<()> {
        loop {
            let Some(timer) = &mut self.timer else {
                if serving.is_at_frame_boundary() {
                    return Poll::Pending;
                }
                self.frames = serving.frames_received();
                self.timer = Some(Box::pin(sleep(self.limit)));
                continue;
            };
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.timer = None;
            if !serving.is_at_frame_boundary() && self.frames == serving.frames_received() {
                return Poll::Ready(());
            }
        }
    }
}
