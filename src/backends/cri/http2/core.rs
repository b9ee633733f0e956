//! What a connection knows, without its socket: bytes come in, and bytes to be sent are there afterwards. Pure.

use std::{collections::VecDeque, task::Waker};

use bytes::Bytes;
use h2::Reason;
use http::request::Parts;

use super::{
    error::{Error, Violation},
    frame::{self, MAX_31},
    hpack::{Decoder, Encoder},
    stream::{Going, Stream},
    streams::{Key, Streams},
};
use crate::backends::cri::{CONNECTION_WINDOW, MAX_HEADER_LIST, STREAM_WINDOW};

mod receive;
mod send;
mod take;

use receive::Block;

/// A window as long as nobody said otherwise (RFC 9113, 6.9.2). Bytes.
const FIRST_WINDOW: u32 = 65_535;
/// While as much waits to be written, no stream adds to it. Bytes.
const OUTPUT: usize = 64 << 10;
/// While as much waits to be written, nothing is read: a peer that does not read gets no answers to its frames. Bytes.
const BACKLOG: usize = 1 << 20;

/// The client's end of a connection.
#[derive(Debug)]
pub(super) struct Core {
    /// What is to be written, and how much of it was.
    out: Vec<u8>,
    written: usize,
    /// Who writes it.
    driver: Option<Waker>,
    encoder: Encoder,
    decoder: Decoder,
    streams: Streams,
    next_id: u32,
    /// A header block that has not come whole.
    block: Option<Block>,
    /// Whether the peer's SETTINGS came, with which it begins.
    greeted: bool,
    /// Why there are no new calls.
    leaving: Option<Error>,

    /// How many streams the peer allows to be open.
    max_open: usize,
    /// What the peer allows on a stream at first, and on the connection now. Bytes.
    first_send_window: i64,
    send_window: i64,
    /// What the peer may still send, and what was taken that it was not told yet. Bytes.
    recv_window: u32,
    taken: u32,

    /// Streams that are not open yet, in order. As many as there are calls.
    waiting: VecDeque<Key>,
    /// Streams that could send, in turns; and those that could if the connection's window was not empty.
    sending: VecDeque<Key>,
    starved: VecDeque<Key>,
}

impl Core {
    /// With the beginning of a connection to be written.
    pub(super) fn new() -> Self {
        let mut out = frame::PREFACE.to_vec();
        let settings = [(2_u16, 0), (4, STREAM_WINDOW), (6, MAX_HEADER_LIST)];
        let settings = settings.map(|(id, value)| [id.to_be_bytes().as_slice(), &value.to_be_bytes()].concat()).concat();
        frame::put(&mut out, frame::SETTINGS, 0, 0, &settings);
        frame::put(&mut out, frame::WINDOW_UPDATE, 0, 0, &(CONNECTION_WINDOW - FIRST_WINDOW).to_be_bytes());
        Self {
            out,
            written: 0,
            driver: None,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            streams: Streams::default(),
            next_id: 1,
            block: None,
            greeted: false,
            leaving: None,
            max_open: usize::MAX,
            first_send_window: FIRST_WINDOW.into(),
            send_window: FIRST_WINDOW.into(),
            recv_window: CONNECTION_WINDOW,
            taken: 0,
            waiting: VecDeque::new(),
            sending: VecDeque::new(),
            starved: VecDeque::new(),
        }
    }

    /// Begins a call, with what there is of its body; `ended` if that is all. An error if there are no new calls here: nothing was sent then.
    pub(super) fn request(&mut self, head: &Parts, body: &Bytes, ended: bool) -> Result<Key, Error> {
        if self.next_id as usize + 2 * self.waiting.len() > MAX_31 as usize {
            self.leaving.get_or_insert(Error::NotSent);
            self.stir();
        }
        if let Some(error) = &self.leaving {
            return Err(error.clone());
        }
        let mut stream = Stream::new(self.first_send_window);
        stream.unsent = body.clone();
        if ended {
            stream.going = Going::Given(None);
        }
        let key = self.streams.add(stream);
        if self.waiting.is_empty() && self.may_open() {
            self.open(key, head);
        } else {
            if let Some(stream) = self.streams.get(key) {
                stream.request = Some(Box::new(head.clone()));
            }
            self.waiting.push_back(key);
        }
        self.stir();
        Ok(key)
    }

    fn may_open(&self) -> bool {
        self.streams.open() < self.max_open && self.backlog() < OUTPUT
    }

    /// Lets a handle go. A call that nobody has a handle of is cancelled.
    pub(super) fn let_go(&mut self, key: Key) {
        let Some(stream) = self.streams.get(key) else { return };
        stream.handles -= 1;
        if stream.handles > 0 {
            return;
        }
        if stream.is_over() {
            self.settle(key);
        } else {
            self.reset(key, Reason::CANCEL, Error::GivenUp);
        }
    }

    /// Ends a stream from our side.
    fn reset(&mut self, key: Key, reason: Reason, error: Error) {
        let Some(stream) = self.streams.get(key) else { return };
        match stream.id {
            0 => self.waiting.retain(|&other| other != key),
            id => frame::put(&mut self.out, frame::RST_STREAM, 0, id, &u32::from(reason).to_be_bytes()),
        }
        stream.end(error);
        self.settle(key);
        self.stir();
    }

    /// Forgets of a stream what is no longer needed. To be called whenever one of its sides ended.
    fn settle(&mut self, key: Key) {
        let Some(stream) = self.streams.get(key) else { return };
        if !stream.is_over() {
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
        let all: Vec<Key> = self.streams.iter().map(|(key, _)| key).collect();
        for key in all {
            if let Some(stream) = self.streams.get(key) {
                let of_stream = if stream.request.is_some() { Error::NotSent } else { error.clone() };
                stream.end(of_stream);
            }
            self.settle(key);
        }
        self.waiting.clear();
    }

    /// Ends all streams, and tells the peer what it did wrong.
    pub(super) fn condemn(&mut self, violation: Violation) {
        self.end_all(&violation.into());
        let payload = [&0_u32.to_be_bytes(), &u32::from(violation.0).to_be_bytes(), violation.1.as_bytes()].concat();
        frame::put(&mut self.out, frame::GOAWAY, 0, 0, &payload);
    }

    /// Whether the peer's first frame came.
    pub(super) fn was_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether the connection has served: there are no new calls, and none is open.
    pub(super) fn is_done(&self) -> bool {
        self.leaving.is_some() && self.streams.open() == 0 && self.waiting.is_empty()
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
