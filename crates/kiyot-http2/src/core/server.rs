//! Server role: requests received and responses sent.

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

/// Payload of the PING sent after the first GOAWAY of a graceful shutdown: its ACK shows that the
/// client has read both.
const SHUTDOWN_PING: &[u8; 8] = b"lastcall";

/// Progress of a graceful shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shutdown {
    No,
    /// GOAWAY with the largest stream id is sent. Requests in flight are still accepted.
    Announced,
    /// GOAWAY with the last accepted stream id is sent.
    Final(u32),
}

/// State of the server role.
#[derive(Debug)]
pub(super) struct ServerState {
    has_preface: bool,
    /// Requests to accept. Accepted after each read.
    pending_accept: VecDeque<(Key, Request<()>)>,
    /// Streams that this side has reset before the client ended them. Their late frames are
    /// ignored.
    reset_streams: HashSet<u32>,
    /// Ids of `reset_streams`, oldest first.
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
    /// Returns a server's core with a limit of concurrent streams.
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

    /// Allows the client more concurrent streams. A lower limit than before changes nothing,
    /// because the client may open more streams before it learns the limit.
    pub(crate) fn raise_max_open(&mut self, max_open: u32) {
        if max_open as usize > self.max_open {
            self.max_open = max_open as usize;
            frame::put_settings(&mut self.out, &[(3, max_open)]);
        }
    }

    /// Removes the client's preface from the front of the bytes. Returns whether the preface is
    /// complete.
    pub(super) fn recv_preface(&mut self, bytes: &mut &[u8]) -> Result<bool, Violation> {
        let Role::Server(server) = &mut self.role else { return Ok(true) };
        if server.has_preface {
            return Ok(true);
        }
        let came = bytes.len().min(frame::PREFACE.len());
        if bytes[..came] != frame::PREFACE[..came] {
            return Err(Violation(Reason::PROTOCOL_ERROR, "connection preface is not HTTP/2"));
        }
        if came == frame::PREFACE.len() {
            *bytes = &bytes[came..];
            server.has_preface = true;
        }
        Ok(server.has_preface)
    }

    /// Returns the next request, skipping cancelled ones.
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

    /// Returns whether the client may open this stream now.
    pub(super) fn can_peer_open(&self, id: u32) -> bool {
        self.is_server() && !id.is_multiple_of(2) && id >= self.next_id
    }

    /// Receives the header block of a request.
    pub(super) fn recv_request(&mut self, id: u32, end_stream: bool, fields: Fields) {
        self.next_id = id + 2;
        let Role::Server(server) = &mut self.role else { return };
        if let Shutdown::Final(_) = server.shutdown {
            // The client sends the request again on another connection, after the last GOAWAY.
            return server.remember_reset(id);
        }
        if self.open_streams() >= self.max_open {
            return self.put_rst_stream(id, Reason::REFUSED_STREAM, !end_stream);
        }
        let mut stream = Stream::new(self.initial_send_window);
        stream.id = id;
        stream.recv_state = if end_stream { RecvState::Closed } else { RecvState::Body };
        let request = fields.into_request().and_then(|request| {
            stream.content_length = content_length(request.headers())?;
            if stream.matches_content_length(0, end_stream) {
                Ok(request)
            } else {
                Err("body length differs from content-length")
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
                tracing::debug!(stream = id, why, "request malformed");
                if why == HEADER_LIST_TOO_LONG {
                    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                    self.put_headers(id, true, &HeaderMap::new(), |put| {
                        put(":status", status.as_str())
                    });
                    if !end_stream {
                        self.put_rst_stream(id, Reason::NO_ERROR, true);
                    }
                } else {
                    self.put_rst_stream(id, Reason::PROTOCOL_ERROR, !end_stream);
                }
            }
        }
    }

    /// Receives a frame on a closed stream.
    pub(super) fn recv_on_closed(&mut self, id: u32, kind: u8) -> Result<(), Violation> {
        let Role::Server(server) = &self.role else { return Ok(()) };
        if server.reset_streams.contains(&id) {
            return Ok(());
        }
        if kind == frame::HEADERS {
            return Err(Violation(Reason::STREAM_CLOSED, "HEADERS on a closed stream"));
        }
        self.put_rst_stream(id, Reason::STREAM_CLOSED, false);
        Ok(())
    }

    /// Sends the head of a response. Fails if the client has reset the stream.
    pub(crate) fn send_response(
        &mut self,
        key: Key,
        head: &response::Parts,
        end_stream: bool,
    ) -> Result<(), Error> {
        let Some(stream) = self.streams.get(key) else { return Err(Error::Aborted) };
        if !matches!(stream.send_state, SendState::Open) {
            return Err(stream.error.clone().unwrap_or(Error::Aborted));
        }
        let id = stream.id;
        if end_stream {
            stream.send_state = SendState::Closed;
        }
        self.put_headers(id, end_stream, &head.headers, |put| put(":status", head.status.as_str()));
        if end_stream {
            self.release_if_closed(key);
        }
        Ok(())
    }

    /// Ready when the client has reset the stream or its connection has ended.
    pub(crate) fn poll_reset(&mut self, key: Key, cx: &Context<'_>) -> Poll<()> {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.was_aborted) else {
            return Poll::Ready(());
        };
        store_waker(&mut stream.recv_task, cx.waker());
        Poll::Pending
    }

    /// Begins a graceful shutdown: asks the client to send no more requests, and accepts requests
    /// in flight.
    pub(crate) fn graceful_shutdown(&mut self) {
        let Role::Server(server) = &mut self.role else { return };
        if server.shutdown == Shutdown::No {
            server.shutdown = Shutdown::Announced;
            self.put_go_away(MAX_U31, Reason::NO_ERROR, "");
            frame::put(&mut self.out, frame::PING, 0, 0, SHUTDOWN_PING);
        }
    }

    /// Receives the ACK of a PING, and ends a graceful shutdown.
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

    /// Returns the last stream id for a GOAWAY: never larger than in an earlier one (RFC 9113,
    /// 6.8).
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
