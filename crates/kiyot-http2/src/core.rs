//! What a connection knows, without its socket: bytes come in, and bytes to be sent are there
//! afterwards. Pure.

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

/// A window as long as nobody said otherwise (RFC 9113, 6.9.2). Bytes.
const INITIAL_WINDOW_BYTES: u32 = 65_535;
/// While as much waits to be written, no stream adds to it. Bytes.
const MAX_OUTPUT_BYTES: usize = 64 << 10;
/// While as much waits to be written, nothing is read: a peer that does not read gets no answers to
/// its frames. Bytes.
const MAX_BACKLOG_BYTES: usize = 1 << 20;

/// Which end of the connection it is.
#[derive(Debug)]
enum Role {
    /// The one that begins calls.
    Client,
    /// The one that calls come to.
    Server(ServerState),
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Core {
    role: Role,
    /// What is to be written, and how much of it was.
    out: Vec<u8>,
    written: usize,
    /// Who writes it. A server's is there whenever something is to be written.
    driver: Option<Waker>,
    encoder: Encoder,
    decoder: Decoder,
    streams: Streams,
    /// The id behind the last that a client used, and what it was when something was written last:
    /// of streams from there on the server knows nothing.
    next_id: u32,
    first_unsent_id: u32,
    /// A header block that has not come whole.
    block: Option<HeaderBlock>,
    /// Whether the peer's SETTINGS came, with which it begins.
    received_settings: bool,
    /// How many frames came.
    frames: u64,
    /// Why there are no new calls.
    closing: Option<Error>,

    /// How many streams may be open: as many as the server allows.
    max_open: usize,
    /// What the peer allows on a stream at first, and on the connection now. Bytes.
    initial_send_window: i64,
    send_window: i64,
    /// What the peer may still send, and what was taken that it was not told yet. Bytes.
    recv_window: u32,
    unclaimed: u32,

    /// A client's streams that are not open yet, in order. As many as there are calls.
    pending_open: VecDeque<Key>,
    /// Streams that could send, in turns; and those that could if the connection's window was not
    /// empty.
    pending_send: VecDeque<Key>,
    pending_capacity: VecDeque<Key>,
}

impl Core {
    /// With the beginning of a connection to be written: what is the role's alone, these settings,
    /// and the connection's window.
    fn new(role: Role, mut out: Vec<u8>, setting: (u16, u32), max_open: usize) -> Self {
        let settings = [setting, (4, STREAM_WINDOW_BYTES), (6, MAX_HEADER_LIST_BYTES)];
        let settings = settings
            .map(|(id, value)| [id.to_be_bytes().as_slice(), &value.to_be_bytes()].concat())
            .concat();
        frame::put(&mut out, frame::SETTINGS, 0, 0, &settings);
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

    /// What comes of a body is for nobody any more.
    pub(super) fn discard_recv(&mut self, key: Key) {
        if let Some(stream) = self.streams.get(key) {
            stream.wants_body = false;
            let left = std::mem::take(&mut stream.recv_buffer).len();
            self.release_connection_capacity(left);
        }
    }

    /// Lets a handle go. A call that nobody has a handle of is cancelled; but an answer that was
    /// given to its end is still sent.
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

    /// Ends a stream from our side.
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

    /// Tells the peer that a stream is no more; it may have sent more of it.
    fn put_rst_stream(&mut self, id: u32, reason: Reason, more_comes: bool) {
        frame::put(&mut self.out, frame::RST_STREAM, 0, id, &u32::from(reason).to_be_bytes());
        if let Role::Server(server) = &mut self.role
            && more_comes
        {
            server.remember_reset(id);
        }
    }

    /// Forgets of a stream what is no longer needed. To be called whenever one of its sides ended.
    fn release_if_closed(&mut self, key: Key) {
        let is_server = self.is_server();
        let Some(stream) = self.streams.get(key) else { return };
        if !stream.is_closed() {
            // A whole answer needs no more of the request, and that is no error (RFC 9113, 8.1).
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
            // There may be room for another, or it was the last.
            if !self.pending_open.is_empty() || self.closing.is_some() {
                self.wake();
            }
        }
        if ref_count == 0 {
            let left = self.streams.remove(key).recv_buffer.len();
            self.release_connection_capacity(left);
        }
    }

    /// Ends all streams: the connection is no more.
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

    /// Ends all streams, and tells the peer what it did wrong.
    pub(super) fn go_away(&mut self, violation: Violation) {
        self.close_streams(&violation.into());
        self.put_go_away(self.last_peer_stream_id(), violation.0, violation.1);
    }

    fn put_go_away(&mut self, last: u32, reason: Reason, why: &str) {
        let payload =
            [&last.to_be_bytes(), &u32::from(reason).to_be_bytes(), why.as_bytes()].concat();
        frame::put(&mut self.out, frame::GOAWAY, 0, 0, &payload);
    }

    /// Whether a stream was never opened.
    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id >= self.next_id
    }

    /// How many frames came whole.
    pub(super) fn frames_received(&self) -> u64 {
        self.frames
    }

    /// Whether the peer has begun, and no header block has come in part.
    pub(super) fn is_at_frame_boundary(&self) -> bool {
        self.received_settings && self.block.is_none()
    }

    /// Whether the peer's first frame came.
    pub(super) fn has_received_settings(&self) -> bool {
        self.received_settings
    }

    /// Whether the connection has served: there are no new calls, and none is open.
    pub(super) fn is_done(&self) -> bool {
        self.closing.is_some() && self.streams.open_streams() == 0 && self.pending_open.is_empty()
    }

    /// How many streams are open.
    pub(super) fn open_streams(&self) -> usize {
        self.streams.open_streams()
    }

    /// Whether there is no stream, of those that are over neither.
    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Wakes the driver.
    fn wake(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }

    /// Whom to wake when there is something to be written.
    pub(super) fn set_driver(&mut self, waker: &Waker) {
        super::stream::store_waker(&mut self.driver, waker);
    }
}

#[cfg(test)]
mod tests;
