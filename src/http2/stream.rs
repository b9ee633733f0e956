//! One stream: what came and was not taken yet, and what is still to be sent.

use std::task::Waker;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, request::Parts};

use super::{STREAM_WINDOW, error::Error};

/// How far the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coming {
    Head,
    Body,
    /// It said that nothing follows.
    Nothing,
}

/// How far we are.
#[derive(Debug)]
pub(super) enum Going {
    /// More may be given.
    Open,
    /// What was given is all, with these trailers.
    Given(Option<HeaderMap>),
    /// The peer was told that nothing follows, or that the stream is no more.
    Nothing,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// 0 as long as the peer was told nothing of it.
    pub(super) id: u32,
    /// How many handles of it there are.
    pub(super) handles: u8,

    pub(super) coming: Coming,
    /// The head of an answer.
    pub(super) head: Option<Response<()>>,
    /// Whether the answer's head says what a body would have, for there is none to a HEAD.
    pub(super) has_no_body: bool,
    /// How much of the body its head says is still to come. Bytes.
    pub(super) promised: Option<u64>,
    /// Whether somebody takes the body.
    pub(super) is_wanted: bool,
    /// At most a window.
    pub(super) body: Vec<u8>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) error: Option<Error>,
    /// Whether it was ended by another than who uses it.
    pub(super) was_cut: bool,
    /// What the peer may still send. Bytes.
    pub(super) recv_window: u32,
    /// What was taken and the peer was not told yet. Bytes.
    pub(super) taken: u32,
    /// Who waits for something to come.
    pub(super) receiver: Option<Waker>,

    pub(super) going: Going,
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
    pub(super) sender: Option<Waker>,
}

impl Stream {
    pub(super) fn new(send_window: i64) -> Self {
        Self {
            id: 0,
            handles: 2,
            coming: Coming::Head,
            head: None,
            has_no_body: false,
            promised: None,
            is_wanted: true,
            body: Vec::new(),
            trailers: None,
            error: None,
            was_cut: false,
            recv_window: STREAM_WINDOW,
            taken: 0,
            receiver: None,
            going: Going::Open,
            request: None,
            unsent: Bytes::new(),
            send_window,
            is_queued: false,
            sender: None,
        }
    }

    /// Whether nothing follows in either direction.
    pub(super) fn is_over(&self) -> bool {
        self.coming == Coming::Nothing && matches!(self.going, Going::Nothing)
    }

    /// Counts what came of the body against what its head promised. Whether it is as much as that.
    pub(super) fn keeps_promise(&mut self, length: usize, ends: bool) -> bool {
        let Some(promised) = &mut self.promised else { return true };
        match promised.checked_sub(length as u64) {
            Some(left) => {
                *promised = left;
                left == 0 || !ends
            }
            None => false,
        }
    }

    /// Ends it in both directions. Who has the whole answer already keeps it.
    pub(super) fn end(&mut self, error: Error) {
        if self.coming != Coming::Nothing {
            self.error = Some(error);
        }
        self.was_cut |= !self.is_over();
        self.coming = Coming::Nothing;
        self.going = Going::Nothing;
        self.unsent = Bytes::new();
        self.request = None;
        self.wake();
    }

    /// Wakes whoever waits for it.
    pub(super) fn wake(&mut self) {
        self.wake_receiver();
        self.wake_sender();
    }

    pub(super) fn wake_receiver(&mut self) {
        if let Some(waker) = self.receiver.take() {
            waker.wake();
        }
    }

    pub(super) fn wake_sender(&mut self) {
        if let Some(waker) = self.sender.take() {
            waker.wake();
        }
    }
}

/// How long a body is, by its head; an error if that is no length.
pub(super) fn promised(head: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut promised = None;
    for value in head.get_all(http::header::CONTENT_LENGTH) {
        match digits(value) {
            Some(length) if promised.is_none_or(|other| other == length) => promised = Some(length),
            _ => return Err("its content-length is no length"),
        }
    }
    Ok(promised)
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok()
}

/// Keeps a waker, without a copy if it is the same.
pub(super) fn keep(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
