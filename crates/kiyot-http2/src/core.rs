//! State of a connection without its socket: bytes received go in, and bytes to send come out.

use std::{collections::VecDeque, task::Waker};

use super::{
    CONNECTION_WINDOW_BYTES, MAX_HEADER_LIST_BYTES, Reason, STREAM_WINDOW_BYTES,
    error::{Error, Violation},
    frame,
    hpack::{Decoder, Encoder},
    stream::{RecvState, SendState},
    streams::{Key, Streams},
};

mod client;
mod fields;
mod frames;
mod recv;
mod send;
mod server;

use frames::HeaderBlock;
use server::ServerState;

/// Flow-control window before any SETTINGS (RFC 9113, 6.9.2).
const INITIAL_WINDOW_BYTES: u32 = 65_535;
/// Output size at which streams stop adding more.
const MAX_OUTPUT_BYTES: usize = 64 << 10;
/// Output size at which reading stops: a peer that doesn't read gets no more responses to its
/// frames.
const MAX_BACKLOG_BYTES: usize = 1 << 20;

/// Role in a connection.
#[derive(Debug)]
enum Role {
    Client,
    Server(ServerState),
}

/// State of a connection.
#[derive(Debug)]
pub(super) struct Core {
    role: Role,
    /// Output; its first `written` bytes are sent.
    out: Vec<u8>,
    written: usize,
    /// Task of a client's connection. A server's connection is polled whenever there is output.
    driver: Option<Waker>,
    encoder: Encoder,
    decoder: Decoder,
    streams: Streams,
    /// Next stream id, and its value at the last write: the peer has seen no stream from that id
    /// on.
    next_id: u32,
    first_unsent_id: u32,
    /// Header block without its END_HEADERS.
    block: Option<HeaderBlock>,
    received_settings: bool,
    /// Frames received.
    frames: u64,
    /// Reason why no new streams are taken.
    closing: Option<Error>,

    /// Concurrent streams that the server allows.
    max_open: usize,
    /// Windows that the peer grants: to a new stream, and to the connection. Bytes.
    initial_send_window: i64,
    send_window: i64,
    /// Window granted to the peer, and capacity released without a WINDOW_UPDATE yet. Bytes.
    recv_window: u32,
    unclaimed: u32,

    /// Streams of a client that wait for the server's limit, in order.
    pending_open: VecDeque<Key>,
    /// Streams with data, in turns, and streams with data that wait for the connection's window.
    pending_send: VecDeque<Key>,
    pending_capacity: VecDeque<Key>,
}

impl Core {
    /// Returns a core whose output begins with `out`, SETTINGS and the connection's WINDOW_UPDATE.
    fn new(role: Role, mut out: Vec<u8>, setting: (u16, u32), max_open: usize) -> Self {
        let settings = [setting, (4, STREAM_WINDOW_BYTES), (6, MAX_HEADER_LIST_BYTES)];
        frame::put_settings(&mut out, &settings);
        frame::put(
            &mut out,
            frame::WINDOW_UPDATE,
            0,
            0,
            &(CONNECTION_WINDOW_BYTES - INITIAL_WINDOW_BYTES).to_be_bytes(),
        );
        Self {
            role,
            out,
            written: 0,
            driver: None,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            streams: Streams::default(),
            next_id: 1,
            first_unsent_id: 1,
            block: None,
            received_settings: false,
            frames: 0,
            closing: None,
            max_open,
            initial_send_window: INITIAL_WINDOW_BYTES.into(),
            send_window: INITIAL_WINDOW_BYTES.into(),
            recv_window: CONNECTION_WINDOW_BYTES,
            unclaimed: 0,
            pending_open: VecDeque::new(),
            pending_send: VecDeque::new(),
            pending_capacity: VecDeque::new(),
        }
    }

    /// Drops the data received on a stream, and all later data.
    pub(super) fn discard_recv(&mut self, key: Key) {
        if let Some(stream) = self.streams.get(key) {
            stream.wants_body = false;
            let left = std::mem::take(&mut stream.recv_buffer).len();
            self.release_connection_capacity(left);
        }
    }

    /// Drops a reference to a stream. A stream without references is cancelled, but a response that
    /// was written to its end is still sent.
    pub(super) fn drop_stream_ref(&mut self, key: Key) {
        let is_server = self.is_server();
        let Some(stream) = self.streams.get(key) else { return };
        stream.ref_count -= 1;
        if stream.ref_count > 0 {
            return;
        }
        if stream.is_closed() || is_server && !matches!(stream.send_state, SendState::Open) {
            self.release_if_closed(key);
        } else {
            self.send_reset(key, Reason::CANCEL, Error::Aborted);
        }
    }

    fn is_server(&self) -> bool {
        matches!(self.role, Role::Server(_))
    }

    /// Resets a stream.
    pub(super) fn send_reset(&mut self, key: Key, reason: Reason, error: Error) {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_closed()) else {
            return;
        };
        let (id, more_comes) = (stream.id, stream.recv_state != RecvState::Closed);
        stream.abort(error);
        match id {
            0 => self.pending_open.retain(|&other| other != key),
            id => self.put_rst_stream(id, reason, more_comes),
        }
        self.release_if_closed(key);
        self.wake();
    }

    /// Writes RST_STREAM. A server ignores the frames that may follow.
    fn put_rst_stream(&mut self, id: u32, reason: Reason, more_comes: bool) {
        frame::put(&mut self.out, frame::RST_STREAM, 0, id, &u32::from(reason).to_be_bytes());
        if let Role::Server(server) = &mut self.role
            && more_comes
        {
            server.remember_reset(id);
        }
    }

    /// Removes the stream if both halves are closed. Called whenever a half has closed.
    fn release_if_closed(&mut self, key: Key) {
        let is_server = self.is_server();
        let Some(stream) = self.streams.get(key) else { return };
        if !stream.is_closed() {
            // A complete response needs no more of the request, and that is no error (RFC 9113,
            // 8.1).
            if is_server && stream.ref_count == 0 && matches!(stream.send_state, SendState::Closed)
            {
                self.send_reset(key, Reason::NO_ERROR, Error::Aborted);
            }
            return;
        }
        let (id, ref_count) = (std::mem::take(&mut stream.id), stream.ref_count);
        if std::mem::take(&mut stream.is_queued) {
            self.pending_send.retain(|&other| other != key);
            self.pending_capacity.retain(|&other| other != key);
        }
        if id != 0 {
            self.streams.remove_id(id);
            // The limit now allows another stream, or this was the last stream.
            if !self.pending_open.is_empty() || self.closing.is_some() {
                self.wake();
            }
        }
        if ref_count == 0 {
            let left = self.streams.remove(key).recv_buffer.len();
            self.release_connection_capacity(left);
        }
    }

    /// Aborts all streams and drops the output: the connection has ended.
    pub(super) fn close(&mut self, error: &Error) {
        self.close_streams(error);
        self.out = Vec::new();
        self.written = 0;
    }

    fn close_streams(&mut self, error: &Error) {
        self.closing = Some(error.clone());
        let (is_server, first_unsent_id) = (self.is_server(), self.first_unsent_id);
        let all: Vec<Key> = self.streams.iter().map(|(key, _)| key).collect();
        for key in all {
            if let Some(stream) = self.streams.get(key) {
                let was_sent =
                    stream.request.is_none() && (is_server || stream.id < first_unsent_id);
                stream.abort(if was_sent { error.clone() } else { Error::NotSent });
            }
            self.release_if_closed(key);
        }
        self.pending_open.clear();
    }

    /// Aborts all streams, and sends the violation in a GOAWAY.
    pub(super) fn go_away(&mut self, violation: Violation) {
        self.close_streams(&violation.into());
        self.put_go_away(self.last_peer_stream_id(), violation.0, violation.1);
    }

    fn put_go_away(&mut self, last: u32, reason: Reason, why: &str) {
        let payload =
            [&last.to_be_bytes(), &u32::from(reason).to_be_bytes(), why.as_bytes()].concat();
        frame::put(&mut self.out, frame::GOAWAY, 0, 0, &payload);
    }

    /// Returns whether a stream has never been opened (RFC 9113, 5.1).
    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id >= self.next_id
    }

    pub(super) fn frames_received(&self) -> u64 {
        self.frames
    }

    /// Returns whether the peer has sent its SETTINGS, and no header block is open.
    pub(super) fn is_at_frame_boundary(&self) -> bool {
        self.received_settings && self.block.is_none()
    }

    pub(super) fn has_received_settings(&self) -> bool {
        self.received_settings
    }

    /// Returns whether no stream is open and no new one is taken.
    pub(super) fn is_done(&self) -> bool {
        self.closing.is_some() && self.streams.open_streams() == 0 && self.pending_open.is_empty()
    }

    pub(super) fn open_streams(&self) -> usize {
        self.streams.open_streams()
    }

    /// Returns whether no stream has references.
    #[cfg(debug_assertions)]
    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Wakes the connection's task.
    fn wake(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }

    /// Sets the task to wake for new output.
    pub(super) fn set_driver(&mut self, waker: &Waker) {
        super::stream::store_waker(&mut self.driver, waker);
    }
}

#[cfg(test)]
mod tests;
