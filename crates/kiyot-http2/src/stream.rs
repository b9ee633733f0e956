//! State of a stream.

use std::task::Waker;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, request::Parts};

use super::{STREAM_WINDOW_BYTES, error::Error};

/// State of the receiving half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecvState {
    Head,
    Body,
    /// END_STREAM received.
    Closed,
}

/// State of the sending half.
#[derive(Debug)]
pub(super) enum SendState {
    /// More data may follow.
    Open,
    /// Ends after the unsent data, with these trailers.
    Finishing(Option<HeaderMap>),
    /// END_STREAM or RST_STREAM sent.
    Closed,
}

#[derive(Debug)]
pub(super) struct Stream {
    /// 0 before the stream is opened.
    pub(super) id: u32,
    /// References of the stream's user.
    pub(super) ref_count: u8,

    pub(super) recv_state: RecvState,
    /// Received head of a response.
    pub(super) head: Option<Response<()>>,
    /// Set for a response to HEAD: its content-length describes a body that is not sent.
    pub(super) has_no_body: bool,
    /// Bytes of the content-length that have not arrived.
    pub(super) content_length: Option<u64>,
    /// Cleared when the body's reader is dropped.
    pub(super) wants_body: bool,
    /// Received data, at most a window.
    pub(super) recv_buffer: Vec<u8>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) error: Option<Error>,
    /// Set if the peer or the end of the connection has ended the stream.
    pub(super) was_aborted: bool,
    /// Window granted to the peer. Bytes.
    pub(super) recv_window: u32,
    /// Capacity released without a WINDOW_UPDATE yet. Bytes.
    pub(super) unclaimed: u32,
    /// Task that waits to receive.
    pub(super) recv_task: Option<Waker>,

    pub(super) send_state: SendState,
    /// Request of a stream that is not opened yet.
    pub(super) request: Option<Box<Parts>>,
    /// Unsent rest of the last part.
    pub(super) unsent: Bytes,
    /// Window granted by the peer. Negative after the peer has lowered it. Bytes.
    pub(super) send_window: i64,
    /// Set while the stream is queued to send.
    pub(super) is_queued: bool,
    /// Task that waits for the last part to be sent.
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

    /// Returns whether both halves are closed.
    pub(super) fn is_closed(&self) -> bool {
        self.recv_state == RecvState::Closed && matches!(self.send_state, SendState::Closed)
    }

    /// Subtracts received bytes from the content-length. Returns false if they don't match it.
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

    /// Closes both halves with an error. A complete message stays readable.
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

    /// Wakes all waiting tasks.
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

/// Returns the content-length of a head.
pub(super) fn content_length(head: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut content_length = None;
    for value in head.get_all(http::header::CONTENT_LENGTH) {
        match digits(value) {
            Some(length) if content_length.is_none_or(|other| other == length) => {
                content_length = Some(length)
            }
            _ => return Err("content-length is no number"),
        }
    }
    Ok(content_length)
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok()
}

/// Stores a waker, unless an equal waker is stored.
pub(super) fn store_waker(place: &mut Option<Waker>, waker: &Waker) {
    match place {
        Some(kept) => kept.clone_from(waker),
        None => *place = Some(waker.clone()),
    }
}
