//! HTTP/2 of the link: profiles, keepalive, client and server.

use std::{error::Error, future::Future, time::Duration};

use hyper::{body::Incoming, rt::Executor};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;
use tower::ServiceExt;

/// The gateway sends a PING after this time without a frame. The agent waits twice as long, so that
/// it rarely has to send a PING.
pub(crate) const GATEWAY_PING_INTERVAL: Duration = Duration::from_secs(5);

/// The gateway closes the connection if it receives nothing within this time after a PING.
pub(crate) const GATEWAY_PING_TIMEOUT: Duration = Duration::from_secs(15);

/// The agent's ping interval. With [`AGENT_PING_TIMEOUT`], 30 s of silence end a connection.
pub(crate) const AGENT_PING_INTERVAL: Duration = Duration::from_secs(10);

/// The agent's ping timeout.
pub(crate) const AGENT_PING_TIMEOUT: Duration = Duration::from_secs(20);

/// The most bytes of a header list (SETTINGS_MAX_HEADER_LIST_SIZE).
const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;

/// The flow control and concurrency limits of a connection, which bound its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// The initial window of a stream, in bytes.
    pub stream_window: u32,
    /// The initial window of the connection, in bytes. Larger than a stream's, so that a stuck
    /// reader does not block the others.
    pub connection_window: u32,
    /// The most buffered bytes of a stream that wait to be sent.
    pub send_buffer: usize,
    /// The most streams that the peer may have open.
    pub max_streams: u32,
}

impl Profile {
    /// The profile of a connection for enrolment.
    pub const ENROL: Self = Self {
        stream_window: 32 * 1024,
        connection_window: 64 * 1024,
        send_buffer: 16 * 1024,
        max_streams: 2,
    };
    /// The profile of a bulk connection. Its window has room for all long streams of a cell with
    /// full windows, and for other calls beside them.
    pub const BULK: Self = Self {
        stream_window: 256 * 1024,
        connection_window: 48 * 1024 * 1024,
        send_buffer: 256 * 1024,
        max_streams: 1024,
    };
}

/// An executor that tracks hyper's tasks and ends them when a token is cancelled.
#[derive(Debug, Clone)]
pub(crate) struct TrackedExecutor {
    pub(crate) end: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl<F> Executor<F> for TrackedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let end = self.end.clone();
        // Boxed: each future that takes this one would reserve room for it, and the task would hold
        // it several times.
        let future = Box::pin(future);
        self.tasks.spawn(async move { end.run_until_cancelled_owned(future).await.map(drop) });
    }
}

/// Returns the builder of a client's connection.
pub(crate) fn client(
    profile: Profile,
    executor: TrackedExecutor,
) -> hyper::client::conn::http2::Builder<TrackedExecutor> {
    let mut builder = hyper::client::conn::http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(profile.stream_window)
        .initial_connection_window_size(profile.connection_window)
        .max_send_buf_size(profile.send_buffer)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        // Frames of a reset stream are ignored only while h2 remembers the stream; later they are
        // a connection error.
        .max_concurrent_reset_streams(profile.max_streams as usize)
        .keep_alive_interval(GATEWAY_PING_INTERVAL)
        .keep_alive_timeout(GATEWAY_PING_TIMEOUT)
        .keep_alive_while_idle(true);
    builder
}

/// Serves calls on a connection until it ends or `end` is cancelled. Running calls are dropped
/// after the connection, so that their callers don't take its end for a cancelled call.
pub async fn serve<I, S>(
    io: I,
    profile: Profile,
    service: S,
    end: CancellationToken,
    tasks: TaskTracker,
) -> Result<(), hyper::Error>
where
    I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    S: tower::Service<http::Request<Body>, Response = http::Response<Body>>
        + Clone
        + Send
        + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    S::Future: Send + 'static,
{
    let service = service.map_request(|request: http::Request<Incoming>| request.map(Body::new));
    // The tasks that hyper spawned end with this function. A task that ended before the connection
    // would reset its call with CANCEL.
    let calls_end = CancellationToken::new();
    let _guard = calls_end.clone().drop_guard();
    let mut builder =
        hyper::server::conn::http2::Builder::new(TrackedExecutor { end: calls_end, tasks });
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(profile.stream_window)
        .initial_connection_window_size(profile.connection_window)
        .max_send_buf_size(profile.send_buffer)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_concurrent_streams(profile.max_streams)
        // While the process is frozen, callers may reset many streams that were not accepted yet.
        // Above this limit h2 sends GOAWAY, which would fail all other calls.
        .max_pending_accept_reset_streams(profile.max_streams as usize)
        .keep_alive_interval(AGENT_PING_INTERVAL)
        .keep_alive_timeout(AGENT_PING_TIMEOUT);
    let connection = builder
        .serve_connection(TokioIo::new(io), hyper_util::service::TowerToHyperService::new(service));
    end.run_until_cancelled(connection).await.unwrap_or(Ok(()))
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending, pin::pin};

    use tokio::sync::Notify;
    use tonic::Code;
    use tower::Service;

    use super::*;
    use crate::{channel::Channel, connection::Connection};

    /// The agent powers off while it answers a call.
    ///
    /// Verifies L28.
    #[tokio::test]
    async fn call_is_unavailable_if_its_connection_ends() {
        let (near, far) = tokio::io::duplex(1 << 20);
        let (tasks, caller_end) = (TaskTracker::new(), CancellationToken::new());
        let opened = Connection::open(near, Profile::BULK, &caller_end, &tasks).await;
        let mut channel = Channel::over(opened.unwrap());
        let request = http::Request::post("/a.B/C").body(Body::empty()).unwrap();
        let response = tokio::spawn(channel.call(request));
        let called = std::sync::Arc::new(Notify::new());
        let notify = called.clone();
        let service = tower::service_fn(move |_| {
            notify.notify_one();
            pending::<Result<http::Response<Body>, Infallible>>()
        });
        let end = CancellationToken::new();
        let mut served = pin!(serve(far, Profile::BULK, service, end.clone(), tasks.clone()));
        tokio::select! {
            ended = &mut served => panic!("{ended:?}"),
            () = called.notified() => {}
        }
        end.cancel();
        // All other tasks run before the connection's task does.
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        served.await.unwrap();
        let error = response.await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        tasks.close();
        tasks.wait().await;
    }

    /// State after a cell was frozen: calls have arrived, and their callers have reset them.
    ///
    /// Verifies L15.
    #[tokio::test]
    async fn calls_reset_before_they_are_accepted_do_not_close_the_connection() {
        const CALLS: usize = 90;
        let (near, far) = tokio::io::duplex(1 << 20);
        let (mut sender, connection) = h2::client::handshake(near).await.unwrap();
        let tasks = TaskTracker::new();
        tasks.spawn(connection);
        let mut call = || {
            let request = http::Request::post("https://cell.test/a.B/C").body(()).unwrap();
            sender.send_request(request, true).unwrap()
        };
        let (response, stream) = call();
        let reset: Vec<(h2::client::ResponseFuture, h2::SendStream<bytes::Bytes>)> =
            (0..CALLS).map(|_| call()).collect();
        // Lets the connection's task send them.
        tokio::task::yield_now().await;
        drop(reset);
        tokio::task::yield_now().await;
        let end = CancellationToken::new();
        let service = tower::service_fn(|_| async {
            Ok::<_, Infallible>(http::Response::new(Body::empty()))
        });
        let served = tasks.spawn(serve(far, Profile::BULK, service, end.clone(), tasks.clone()));
        assert_eq!(response.await.unwrap().status(), 200);
        drop(stream);
        end.cancel();
        served.await.unwrap().unwrap();
    }
}
