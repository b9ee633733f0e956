//! What a connection knows, without its socket: bytes come in, and bytes to be sent are there
//! afterwards. Pure.

use std::{collections::VecDeque, task::Waker};

use super::{
    CONNECTION_WINDOW, MAX_HEADER_LIST, Reason, STREAM_WINDOW,
    error::{Error, Violation},
    frame,
    hpack::{Decoder, Encoder},
    stream::{Coming, Going},
    streams::{Key, Streams},
};

mod asked;
mod asking;
mod fields;
mod receive;
mod send;
mod take;

use asked::Asked;
use receive::Block;

/// A window as long as nobody said otherwise (RFC 9113, 6.9.2). Bytes.
const FIRST_WINDOW: u32 = 65_535;
/// While as much waits to be written, no stream adds to it. Bytes.
const OUTPUT: usize = 64 << 10;
/// While as much waits to be written, nothing is read: a peer that does not read gets no answers to
/// its frames. Bytes.
const BACKLOG: usize = 1 << 20;

/// Which end of the connection it is.
#[derive(Debug)]
enum Role {
    /// The one that begins calls.
    Client,
    /// The one that calls come to.
    Server(Asked),
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
    unwritten_id: u32,
    /// A header block that has not come whole.
    block: Option<Block>,
    /// Whether the peer's SETTINGS came, with which it begins.
    greeted: bool,
    /// How many frames came.
    frames: u64,
    /// Why there are no new calls.
    leaving: Option<Error>,

    /// How many streams may be open: as many as the server allows.
    max_open: usize,
    /// What the peer allows on a stream at first, and on the connection now. Bytes.
    first_send_window: i64,
    send_window: i64,
    /// What the peer may still send, and what was taken that it was not told yet. Bytes.
    recv_window: u32,
    taken: u32,

    /// A client's streams that are not open yet, in order. As many as there are calls.
    waiting: VecDeque<Key>,
    /// Streams that could send, in turns; and those that could if the connection's window was not
    /// empty.
    sending: VecDeque<Key>,
    starved: VecDeque<Key>,
}

impl Core {
    /// With the beginning of a connection to be written: what is the role's alone, these settings,
    /// and the connection's window.
    fn new(role: Role, mut out: Vec<u8>, setting: (u16, u32), max_open: usize) -> Self {
        let settings = [setting, (4, STREAM_WINDOW), (6, MAX_HEADER_LIST)];
        let settings = settings
            .map(|(id, value)| [id.to_be_bytes().as_slice(), &value.to_be_bytes()].concat())
            .concat();
        frame::put(&mut out, frame::SETTINGS, 0, 0, &settings);
        frame::put(
            &mut out,
            frame::WINDOW_UPDATE,
            0,
            0,
            &(CONNECTION_WINDOW - FIRST_WINDOW).to_be_bytes(),
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
            unwritten_id: 1,
            block: None,
            greeted: false,
            frames: 0,
            leaving: None,
            max_open,
            first_send_window: FIRST_WINDOW.into(),
            send_window: FIRST_WINDOW.into(),
            recv_window: CONNECTION_WINDOW,
            taken: 0,
            waiting: VecDeque::new(),
            sending: VecDeque::new(),
            starved: VecDeque::new(),
        }
    }

    /// What comes of a body is for nobody any more.
    pub(super) fn ignore(&mut self, key: Key) {
        if let Some(stream) = self.streams.get(key) {
            stream.is_wanted = false;
            let left = std::mem::take(&mut stream.body).len();
            self.was_taken(left);
        }
    }

    /// Lets a handle go. A call that nobody has a handle of is cancelled; but an answer that was
    /// given to its end is still sent.
    pub(super) fn let_go(&mut self, key: Key) {
        let is_server = self.is_server();
        let Some(stream) = self.streams.get(key) else { return };
        stream.handles -= 1;
        if stream.handles > 0 {
            return;
        }
        if stream.is_over() || is_server && !matches!(stream.going, Going::Open) {
            self.settle(key);
        } else {
            self.reset(key, Reason::CANCEL, Error::GivenUp);
        }
    }

    fn is_server(&self) -> bool {
        matches!(self.role, Role::Server(_))
    }

    /// Ends a stream from our side.
    pub(super) fn reset(&mut self, key: Key, reason: Reason, error: Error) {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_over()) else { return };
        let (id, more_comes) = (stream.id, stream.coming != Coming::Nothing);
        stream.end(error);
        match id {
            0 => self.waiting.retain(|&other| other != key),
            id => self.put_reset(id, reason, more_comes),
        }
        self.settle(key);
        self.stir();
    }

    /// Tells the peer that a stream is no more; it may have sent more of it.
    fn put_reset(&mut self, id: u32, reason: Reason, more_comes: bool) {
        frame::put(&mut self.out, frame::RST_STREAM, 0, id, &u32::from(reason).to_be_bytes());
        if let Role::Server(asked) = &mut self.role
            && more_comes
        {
            asked.has_reset(id);
        }
    }

    /// Forgets of a stream what is no longer needed. To be called whenever one of its sides ended.
    fn settle(&mut self, key: Key) {
        let is_server = self.is_server();
        let Some(stream) = self.streams.get(key) else { return };
        if !stream.is_over() {
            // A whole answer needs no more of the request, and that is no error (RFC 9113, 8.1).
            if is_server && stream.handles == 0 && matches!(stream.going, Going::Nothing) {
                self.reset(key, Reason::NO_ERROR, Error::GivenUp);
            }
            return;
        }
        let (id, handles) = (std::mem::take(&mut stream.id), stream.handles);
        if std::mem::take(&mut stream.is_queued) {
            self.sending.retain(|&other| other != key);
            self.starved.retain(|&other| other != key);
        }
        if id != 0 {
            self.streams.forget_id(id);
            // There may be room for another, or it was the last.
            if !self.waiting.is_empty() || self.leaving.is_some() {
                self.stir();
            }
        }
        if handles == 0 {
            let left = self.streams.remove(key).body.len();
            self.was_taken(left);
        }
    }

    /// Ends all streams: the connection is no more.
    pub(super) fn end(&mut self, error: &Error) {
        self.end_all(error);
        self.out = Vec::new();
        self.written = 0;
    }

    fn end_all(&mut self, error: &Error) {
        self.leaving = Some(error.clone());
        let (is_server, unwritten_id) = (self.is_server(), self.unwritten_id);
        let all: Vec<Key> = self.streams.iter().map(|(key, _)| key).collect();
        for key in all {
            if let Some(stream) = self.streams.get(key) {
                let was_sent = stream.request.is_none() && (is_server || stream.id < unwritten_id);
                stream.end(if was_sent { error.clone() } else { Error::NotSent });
            }
            self.settle(key);
        }
        self.waiting.clear();
    }

    /// Ends all streams, and tells the peer what it did wrong.
    pub(super) fn condemn(&mut self, violation: Violation) {
        self.end_all(&violation.into());
        self.put_goaway(self.last_of_peer(), violation.0, violation.1);
    }

    fn put_goaway(&mut self, last: u32, reason: Reason, why: &str) {
        let payload =
            [&last.to_be_bytes(), &u32::from(reason).to_be_bytes(), why.as_bytes()].concat();
        frame::put(&mut self.out, frame::GOAWAY, 0, 0, &payload);
    }

    /// Whether a stream was never opened.
    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id >= self.next_id
    }

    /// How many frames came whole.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// Whether the peer has begun, and no header block has come in part.
    pub(super) fn is_between_frames(&self) -> bool {
        self.greeted && self.block.is_none()
    }

    /// Whether the peer's first frame came.
    pub(super) fn was_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether the connection has served: there are no new calls, and none is open.
    pub(super) fn is_done(&self) -> bool {
        self.leaving.is_some() && self.streams.open() == 0 && self.waiting.is_empty()
    }

    /// How many streams are open.
    pub(super) fn open(&self) -> usize {
        self.streams.open()
    }

    /// Whether there is no stream, of those that are over neither.
    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Wakes the driver.
    fn stir(&self) {
        if let Some(driver) = &self.driver {
            driver.wake_by_ref();
        }
    }

    /// Whom to wake when there is something to be written.
    pub(super) fn set_driver(&mut self, waker: &Waker) {
        super::stream::keep(&mut self.driver, waker);
    }
}

#[cfg(test)]
mod tests;
