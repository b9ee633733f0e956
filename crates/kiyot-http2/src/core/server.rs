//! What a server hears and answers.

use std::{
    collections::{HashSet, VecDeque},
    task::{Context, Poll},
};

use http::{HeaderMap, Request, StatusCode, response};

use super::{
    Core, Role,
    fields::{Fields, HEADER_LIST_TOO_LONG},
};
use crate::{
    MAX_RESET_STREAMS, Reason,
    error::{Error, Violation},
    frame::{self, MAX_U31},
    stream::{RecvState, SendState, Stream, content_length, store_waker},
    streams::Key,
};

/// What is in the PING whose answer says that a client has heard of the end to come.
const SHUTDOWN_PING: &[u8; 8] = b"lastcall";

/// How far the end of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shutdown {
    No,
    /// The client was told, and may have sent calls before it heard.
    Announced,
    /// The client was told that this call was the last.
    Final(u32),
}

/// What is a server's alone.
#[derive(Debug)]
pub(super) struct ServerState {
    /// Whether the client's preface came.
    has_preface: bool,
    /// Calls that came and were not accepted yet. Accepted whenever something was read.
    pending_accept: VecDeque<(Key, Request<()>)>,
    /// Streams that we ended before the client had. What comes of them was under way.
    reset_streams: HashSet<u32>,
    /// The same, oldest first.
    reset_order: VecDeque<u32>,
    shutdown: Shutdown,
}

impl ServerState {
    pub(super) fn remember_reset(&mut self, id: u32) {
        if self.reset_order.len() >= MAX_RESET_STREAMS
            && let Some(oldest) = self.reset_order.pop_front()
        {
            self.reset_streams.remove(&oldest);
        }
        if self.reset_streams.insert(id) {
            self.reset_order.push_back(id);
        }
    }
}

impl Core {
    /// Of a server that allows so many streams at once.
    pub(crate) fn server(max_open: u32) -> Self {
        let server = ServerState {
            has_preface: false,
            pending_accept: VecDeque::new(),
            reset_streams: HashSet::new(),
            reset_order: VecDeque::new(),
            shutdown: Shutdown::No,
        };
        Self::new(Role::Server(server), Vec::new(), (3, max_open), max_open as usize)
    }

    /// Takes the preface with which a client begins off the front of what came. Whether it came
    /// whole, or long before.
    pub(super) fn recv_preface(&mut self, bytes: &mut &[u8]) -> Result<bool, Violation> {
        let Role::Server(server) = &mut self.role else { return Ok(true) };
        if server.has_preface {
            return Ok(true);
        }
        let came = bytes.len().min(frame::PREFACE.len());
        if bytes[..came] != frame::PREFACE[..came] {
            return Err(Violation(Reason::PROTOCOL_ERROR, "it does not begin as HTTP/2 does"));
        }
        if came == frame::PREFACE.len() {
            *bytes = &bytes[came..];
            server.has_preface = true;
        }
        Ok(server.has_preface)
    }

    /// A call that came. One that was cancelled already is none.
    pub(crate) fn accept(&mut self) -> Option<(Key, Request<()>)> {
        loop {
            let Role::Server(server) = &mut self.role else { return None };
            let (key, request) = server.pending_accept.pop_front()?;
            let stream = self.streams.get(key)?;
            if !stream.was_aborted {
                return Some((key, request));
            }
            stream.ref_count = 0;
            self.release_if_closed(key);
        }
    }

    /// Whether the peer may open this stream now.
    pub(super) fn can_peer_open(&self, id: u32) -> bool {
        self.is_server() && !id.is_multiple_of(2) && id >= self.next_id
    }

    /// Takes the header block that a stream begins with.
    pub(super) fn recv_request(&mut self, id: u32, ends: bool, fields: Fields) {
        self.next_id = id + 2;
        let Role::Server(server) = &mut self.role else { return };
        if let Shutdown::Final(_) = server.shutdown {
            // The client knows that nothing is done with it.
            return server.remember_reset(id);
        }
        if self.open_streams() >= self.max_open {
            return self.put_rst_stream(id, Reason::REFUSED_STREAM, !ends);
        }
        let mut stream = Stream::new(self.initial_send_window);
        stream.id = id;
        stream.recv_state = if ends { RecvState::Closed } else { RecvState::Body };
        let request = fields.into_request().and_then(|request| {
            stream.content_length = content_length(request.headers())?;
            if stream.matches_content_length(0, ends) {
                Ok(request)
            } else {
                Err("its content-length is not its length")
            }
        });
        match request {
            Ok(request) => {
                let key = self.streams.insert(stream);
                self.streams.set_id(key, id);
                if let Role::Server(server) = &mut self.role {
                    server.pending_accept.push_back((key, request));
                }
            }
            Err(why) => {
                tracing::debug!(stream = id, why, "a request is malformed");
                if why == HEADER_LIST_TOO_LONG {
                    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                    self.put_headers(id, true, &HeaderMap::new(), |put| {
                        put(":status", status.as_str())
                    });
                    if !ends {
                        self.put_rst_stream(id, Reason::NO_ERROR, true);
                    }
                } else {
                    self.put_rst_stream(id, Reason::PROTOCOL_ERROR, !ends);
                }
            }
        }
    }

    /// Something came of a stream that is no more.
    pub(super) fn recv_on_closed(&mut self, id: u32, kind: u8) -> Result<(), Violation> {
        let Role::Server(server) = &self.role else { return Ok(()) };
        if server.reset_streams.contains(&id) {
            return Ok(());
        }
        if kind == frame::HEADERS {
            return Err(Violation(Reason::STREAM_CLOSED, "a stream begins again behind its end"));
        }
        self.put_rst_stream(id, Reason::STREAM_CLOSED, false);
        Ok(())
    }

    /// Begins an answer; `ended` if there is nothing more of it. An error if the caller has gone.
    pub(crate) fn send_response(
        &mut self,
        key: Key,
        head: &response::Parts,
        ended: bool,
    ) -> Result<(), Error> {
        let Some(stream) = self.streams.get(key) else { return Err(Error::Aborted) };
        if !matches!(stream.send_state, SendState::Open) {
            return Err(stream.error.clone().unwrap_or(Error::Aborted));
        }
        let id = stream.id;
        if ended {
            stream.send_state = SendState::Closed;
        }
        self.put_headers(id, ended, &head.headers, |put| put(":status", head.status.as_str()));
        if ended {
            self.release_if_closed(key);
        }
        Ok(())
    }

    /// Ready when the client wants no answer any more.
    pub(crate) fn poll_reset(&mut self, key: Key, cx: &Context<'_>) -> Poll<()> {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.was_aborted) else {
            return Poll::Ready(());
        };
        store_waker(&mut stream.recv_task, cx.waker());
        Poll::Pending
    }

    /// Tells the client that it should send no more calls here. Those that it sends before it has
    /// heard are taken as well.
    pub(crate) fn graceful_shutdown(&mut self) {
        let Role::Server(server) = &mut self.role else { return };
        if server.shutdown == Shutdown::No {
            server.shutdown = Shutdown::Announced;
            self.put_go_away(MAX_U31, Reason::NO_ERROR, "");
            frame::put(&mut self.out, frame::PING, 0, 0, SHUTDOWN_PING);
        }
    }

    /// An answer to a PING came.
    pub(super) fn recv_ping_ack(&mut self, payload: &[u8]) {
        let last = self.last_peer_stream_id();
        if let Role::Server(server) = &mut self.role
            && server.shutdown == Shutdown::Announced
            && payload == SHUTDOWN_PING
        {
            server.shutdown = Shutdown::Final(last);
            self.closing.get_or_insert(Error::Aborted);
            self.put_go_away(last, Reason::NO_ERROR, "");
        }
    }

    /// The last stream that something is done with, or was. Never a later one than the client was
    /// told before (RFC 9113, 6.8).
    pub(super) fn last_peer_stream_id(&self) -> u32 {
        match &self.role {
            Role::Client => 0,
            Role::Server(ServerState { shutdown: Shutdown::Final(last), .. }) => *last,
            Role::Server(_) => self.next_id.saturating_sub(2),
        }
    }
}

#[cfg(test)]
mod tests;
