//! One stream: what came and was not taken yet, and what is still to be sent.

use std::task::Waker;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, request::Parts};

use super::{STREAM_WINDOW_BYTES, error::Error};

/// How far the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecvState {
    Head,
    Body,
    /// It said that nothing follows.
    Closed,
}

/// How far we are.
#[derive(Debug)]
pub(super) enum SendState {
    /// More may be given.
    Open,
    /// What was given is all, with these trailers.
    Finishing(Option<HeaderMap>),
    /// The peer was told that nothing follows, or that the stream is no more.
    Closed,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// 0 as long as the peer was told nothing of it.
    pub(super) id: u32,
    /// How many handles of it there are.
    pub(super) ref_count: u8,

    pub(super) recv_state: RecvState,
    /// The head of an answer.
    pub(super) head: Option<Response<()>>,
    /// Whether the answer's head says what a body would have, for there is none to a HEAD.
    pub(super) has_no_body: bool,
    /// How much of the body its head says is still to come. Bytes.
    pub(super) content_length: Option<u64>,
    /// Whether somebody takes the body.
    pub(super) wants_body: bool,
    /// At most a window.
    pub(super) recv_buffer: Vec<u8>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) error: Option<Error>,
    /// Whether it was ended by another than who uses it.
    pub(super) was_aborted: bool,
    /// What the peer may still send. Bytes.
    pub(super) recv_window: u32,
    /// What was taken and the peer was not told yet. Bytes.
    pub(super) unclaimed: u32,
    /// Who waits for something to come.
    pub(super) recv_task: Option<Waker>,

    pub(super) send_state: SendState,
    /// The request, as long as the peer was told nothing of it.
    pub(super) request: Option<Box<Parts>>,
    /// The part that was given last, as far as it was not sent.
    pub(super) unsent: Bytes,
    /// What we may still send; less than nothing when the peer took back what it had allowed.
    /// Bytes.
    pub(super) send_window: i64,
    /// Whether it stands in a queue of those that could send.
    pub(super) is_queued: bool,
    /// Who waits for all that was given to be sent.
    pub(super) send_task: Option<Waker>,
}

impl Stream {
    pub(super) fn new(send_window: i64) -> Self {
        Self {
            id: 0,
            ref_count: 2,
            recv_state: RecvState::Head,
            head: None,
            has_no_body: false,
            content_length: None,
            wants_body: true,
            recv_buffer: Vec::new(),
            trailers: None,
            error: None,
            was_aborted: false,
            recv_window: STREAM_WINDOW_BYTES,
            unclaimed: 0,
            recv_task: None,
            send_state: SendState::Open,
            request: None,
            unsent: Bytes::new(),
            send_window,
            is_queued: false,
            send_task: None,
        }
    }

    /// Whether nothing follows in either direction.
    pub(super) fn is_closed(&self) -> bool {
        self.recv_state == RecvState::Closed && matches!(self.send_state, SendState::Closed)
    }

    /// Counts what came of the body against what its head promised. Whether it is as much as that.
    pub(super) fn matches_content_length(&mut self, length: usize, ends: bool) -> bool {
        let Some(content_length) = &mut self.content_length else { return true };
        match content_length.checked_sub(length as u64) {
            Some(left) => {
                *content_length = left;
                left == 0 || !ends
            }
            None => false,
        }
    }

    /// Ends it in both directions. Who has the whole answer already keeps it.
    pub(super) fn abort(&mut self, error: Error) {
        if self.recv_state != RecvState::Closed {
            self.error = Some(error);
        }
        self.was_aborted |= !self.is_closed();
        self.recv_state = RecvState::Closed;
        self.send_state = SendState::Closed;
        self.unsent = Bytes::new();
        self.request = None;
        self.wake();
    }

    /// Wakes whoever waits for it.
    pub(super) fn wake(&mut self) {
        self.wake_recv();
        self.wake_send();
    }

    pub(super) fn wake_recv(&mut self) {
        if let Some(waker) = self.recv_task.take() {
            waker.wake();
        }
    }

    pub(super) fn wake_send(&mut self) {
        if let Some(waker) = self.send_task.take() {
            waker.wake();
        }
    }
}

/// How long a body is, by its head; an error if that is no length.
pub(super) fn content_length(head: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut content_length = None;
    for value in head.get_all(http::header::CONTENT_LENGTH) {
        match digits(value) {
            Some(length) if content_length.is_none_or(|other| other == length) => {
                content_length = Some(length)
            }
            _ => return Err("its content-length is no length"),
        }
    }
    Ok(content_length)
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok()
}

/// Keeps a waker, without a copy if it is the same.
pub(super) fn store_waker(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
