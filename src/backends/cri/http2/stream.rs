//! One stream: what came of the answer and was not taken yet, and what is still to be sent.

use std::task::Waker;

use bytes::Bytes;
use http::{HeaderMap, Response, request::Parts};

use super::error::Error;
use crate::backends::cri::STREAM_WINDOW;

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
    pub(super) head: Option<Response<()>>,
    /// At most a window.
    pub(super) body: Vec<u8>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) error: Option<Error>,
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
    /// What we may still send; less than nothing when the peer took back what it had allowed. Bytes.
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
            body: Vec::new(),
            trailers: None,
            error: None,
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

    /// Ends it in both directions. Who has the whole answer already keeps it.
    pub(super) fn end(&mut self, error: Error) {
        if self.coming != Coming::Nothing {
            self.error = Some(error);
        }
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

/// Keeps a waker, without a copy if it is the same.
pub(super) fn keep(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
