//! HTTP/2 on a connection of the link, on either side of it.

use std::{error::Error, future::Future, time::Duration};

use hyper::{body::Incoming, rt::Executor};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::body::Body;
use tower::ServiceExt;

/// How long a side hears nothing before it asks for a sign of life, on the gateway's side. The
/// agent waits twice as long: mostly it need not ask.
pub(crate) const PING_AFTER: Duration = Duration::from_secs(5);

/// How long the gateway waits for that sign. After it the connection is dropped.
pub(crate) const PONG_WITHIN: Duration = Duration::from_secs(15);

/// The same for the agent: together with its `PING_AFTER`, 30 s of silence end a connection.
pub(crate) const AGENT_PING_AFTER: Duration = Duration::from_secs(10);

/// See [`AGENT_PING_AFTER`].
pub(crate) const AGENT_PONG_WITHIN: Duration = Duration::from_secs(20);

/// The most header bytes of one message.
const HEADER_LIMIT: u32 = 16 * 1024;

/// How much a connection may hold in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Bytes that the other side may send on one stream before they are taken.
    pub stream_window: u32,
    /// The same for the whole connection. Larger than a stream's, so that one stuck reader doesn't
    /// stop the others.
    pub connection_window: u32,
    /// Bytes of one stream that wait to be sent.
    pub send_buffer: usize,
    /// Streams that the other side may have open.
    pub streams: u32,
}

impl Profile {
    /// For one `Enrol`.
    pub const ENROL: Self = Self {
        stream_window: 32 * 1024,
        connection_window: 64 * 1024,
        send_buffer: 16 * 1024,
        streams: 2,
    };
    /// All calls to a cell. As many streams as a cell may have open can be stuck with full windows,
    /// and the others still have room.
    pub const BULK: Self = Self {
        stream_window: 256 * 1024,
        connection_window: 48 * 1024 * 1024,
        send_buffer: 256 * 1024,
        streams: 1024,
    };
}

/// Runs what hyper spawns, until a token is cancelled.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    pub(crate) end: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl<F> Executor<F> for Owned
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let end = self.end.clone();
        // Boxed, or the task would have room for several copies of it: it is moved from one future
        // into the next.
        let future = Box::pin(future);
        self.tasks.spawn(async move { end.run_until_cancelled_owned(future).await.map(drop) });
    }
}

/// The builder for the side that calls.
pub(crate) fn client(profile: Profile, owner: Owned) -> hyper::client::conn::http2::Builder<Owned> {
    let mut builder = hyper::client::conn::http2::Builder::new(owner);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(profile.stream_window)
        .initial_connection_window_size(profile.connection_window)
        .max_send_buf_size(profile.send_buffer)
        .max_header_list_size(HEADER_LIMIT)
        // What comes of calls that were given up is passed over, as long as they are remembered:
        // else it counts as a fault of the other side's.
        .max_concurrent_reset_streams(profile.streams as usize)
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PONG_WITHIN)
        .keep_alive_while_idle(true);
    builder
}

/// Serves calls on a connection until it ends, or `end` is cancelled. The calls that run then are
/// dropped.
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
    // Whatever way this ends, what was spawned for it ends too.
    let end = end.child_token();
    let _all = end.clone().drop_guard();
    let mut builder = hyper::server::conn::http2::Builder::new(Owned { end: end.clone(), tasks });
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(profile.stream_window)
        .initial_connection_window_size(profile.connection_window)
        .max_send_buf_size(profile.send_buffer)
        .max_header_list_size(HEADER_LIMIT)
        .max_concurrent_streams(profile.streams)
        // Calls that their callers gave up before this side looked at them, as while it was frozen:
        // more than a few would else end all others.
        .max_pending_accept_reset_streams(profile.streams as usize)
        .keep_alive_interval(AGENT_PING_AFTER)
        .keep_alive_timeout(AGENT_PONG_WITHIN);
    let connection = builder
        .serve_connection(TokioIo::new(io), hyper_util::service::TowerToHyperService::new(service));
    end.run_until_cancelled(connection).await.unwrap_or(Ok(()))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// As after a cell was frozen: calls came, and their callers have given up since.
    /// Verifies L15.
    #[tokio::test]
    async fn calls_that_were_given_up_before_they_were_looked_at_cut_no_others() {
        const CALLS: usize = 90;
        let (near, far) = tokio::io::duplex(1 << 20);
        let (mut sender, connection) = h2::client::handshake(near).await.unwrap();
        let tasks = TaskTracker::new();
        tasks.spawn(connection);
        let mut call = || {
            let request = http::Request::post("https://cell.test/a.B/C").body(()).unwrap();
            sender.send_request(request, true).unwrap()
        };
        let (answer, stream) = call();
        let given_up: Vec<(h2::client::ResponseFuture, h2::SendStream<bytes::Bytes>)> =
            (0..CALLS).map(|_| call()).collect();
        // So that they are sent.
        tokio::task::yield_now().await;
        drop(given_up);
        tokio::task::yield_now().await;
        let end = CancellationToken::new();
        let service = tower::service_fn(|_| async {
            Ok::<_, Infallible>(http::Response::new(Body::empty()))
        });
        let served = tasks.spawn(serve(far, Profile::BULK, service, end.clone(), tasks.clone()));
        assert_eq!(answer.await.unwrap().status(), 200);
        drop(stream);
        end.cancel();
        served.await.unwrap().unwrap();
    }
}
