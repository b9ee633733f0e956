//! Server connections.

use std::{
    future::poll_fn,
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, response};
use tokio::{net::UnixStream, time::timeout};

use crate::{
    Error, Reason, Violation,
    body::{RecvStream, SendStream, StreamRef, lock},
    core::Core,
    io::Io,
};

/// Time for the last bytes of a connection.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection with incoming requests. Its owner polls it, again after each use of its streams,
/// because streams don't wake it.
#[derive(Debug)]
pub struct Connection {
    io: Io,
    core: Arc<Mutex<Core>>,
}

/// A response that has not begun.
#[derive(Debug)]
pub struct SendResponse(SendStream);

/// Begins a connection on an accepted socket, with a limit of concurrent streams. The client's
/// preface and SETTINGS are read by [`Connection::poll_read`].
///
/// # Errors
/// For a socket that can't be registered.
pub fn handshake(stream: UnixStream, max_concurrent_streams: u32) -> io::Result<Connection> {
    let core = Core::server(max_concurrent_streams);
    Ok(Connection { io: Io::new(stream)?, core: Arc::new(Mutex::new(core)) })
}

impl Connection {
    /// Allows the client more concurrent streams. A lower limit than before changes nothing.
    pub fn raise_max_concurrent_streams(&mut self, limit: u32) {
        lock(&self.core).raise_max_open(limit);
    }

    /// Reads once; then [`Self::accept`] returns the requests that arrived. Returns false at the
    /// end of the connection.
    ///
    /// # Errors
    /// For a violation of HTTP/2. All streams have ended then.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, Error>> {
        self.io.poll_read(cx, &self.core)
    }

    /// Returns the next request, skipping cancelled ones.
    pub fn accept(&mut self) -> Option<(Request<RecvStream>, SendResponse)> {
        let (key, head) = lock(&self.core).accept()?;
        let stream = || StreamRef::new(&self.core, key);
        Some((head.map(|()| RecvStream::new(stream())), SendResponse(SendStream::new(stream()))))
    }

    /// Writes all output.
    ///
    /// # Errors
    /// For a socket that can't be written to.
    pub fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.poll_write(cx, &self.core)
    }

    /// Returns whether the connection reads: it doesn't while the client leaves too much output
    /// unread.
    pub fn may_read(&self) -> bool {
        lock(&self.core).may_read()
    }

    /// Counts the frames received.
    pub fn frames_received(&self) -> u64 {
        lock(&self.core).frames_received()
    }

    /// Returns whether the client has sent its SETTINGS and no partial frame since. A client may
    /// stay idle in this state.
    pub fn is_at_frame_boundary(&self) -> bool {
        !self.io.has_partial_frame() && lock(&self.core).is_at_frame_boundary()
    }

    /// Returns whether the client has sent its SETTINGS.
    pub fn has_received_settings(&self) -> bool {
        lock(&self.core).has_received_settings()
    }

    /// Asks the client to send no more requests. The connection is done when all requests that the
    /// client has sent until it knew have ended.
    pub fn graceful_shutdown(&mut self) {
        lock(&self.core).graceful_shutdown();
    }

    /// Returns whether all streams have ended after a shutdown, and all output is written.
    pub fn is_done(&self) -> bool {
        let core = lock(&self.core);
        core.is_done() && core.backlog() == 0
    }

    /// Ends all streams, and sends the output and a GOAWAY with this reason and text.
    pub async fn abrupt_shutdown(self, reason: Reason, text: &'static str) {
        if self.has_received_settings() {
            lock(&self.core).go_away(Violation(reason, text));
        }
        self.flush().await;
    }

    /// Writes all output, but ends after a bounded time if the client doesn't read.
    pub async fn flush(mut self) {
        // The output of a client that doesn't read is lost.
        let _ = timeout(FLUSH_TIMEOUT, poll_fn(|cx| self.poll_write(cx))).await;
    }
}

impl SendResponse {
    /// Sends the head of the response, or all of it if `end_of_stream`.
    ///
    /// # Errors
    /// For a stream that the client has reset.
    pub fn send_response(
        self,
        head: &response::Parts,
        end_of_stream: bool,
    ) -> Result<SendStream, Error> {
        self.0.send_response(head, end_of_stream)?;
        Ok(self.0)
    }

    /// Ready when the client has reset the stream or its connection has ended.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll_reset(cx)
    }

    /// Resets the stream.
    pub fn send_reset(mut self, reason: Reason) {
        self.0.send_reset(reason);
    }
}
