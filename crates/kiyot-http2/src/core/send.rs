//! Output, as far as the peer's windows and the limits of the output allow.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, header};

use super::{Core, MAX_BACKLOG_BYTES, MAX_OUTPUT_BYTES};
use crate::{
    Reason,
    error::{Error, Violation},
    frame::{self, HEADER_LEN, Head, MAX_PAYLOAD_BYTES, MAX_U31},
    hpack::Encoder,
    stream::{SendState, store_waker},
    streams::Key,
};

/// Headers whose values differ in each call.
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Result of a stream's turn to send.
enum Turn {
    /// The stream has more data and window.
    More,
    /// The stream waits for its window or for data, or has ended.
    Done,
    /// The stream waits for the connection's window.
    NoCapacity,
}

impl Core {
    /// Returns the bytes of the output.
    pub(crate) fn backlog(&self) -> usize {
        self.out.len() - self.written
    }

    /// Returns whether this side reads: it doesn't while the peer leaves too much output unread.
    pub(crate) fn may_read(&self) -> bool {
        self.backlog() < MAX_BACKLOG_BYTES
    }

    /// Returns the output after adding what streams may send now.
    pub(crate) fn output(&mut self) -> &[u8] {
        self.fill_output();
        &self.out[self.written..]
    }

    /// Removes written bytes from the output.
    pub(crate) fn advance(&mut self, length: usize) {
        self.written += length;
        self.first_unsent_id = self.next_id;
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
            // Frees the memory of a long output.
            self.out.shrink_to(2 * MAX_OUTPUT_BYTES);
        } else if self.written >= MAX_OUTPUT_BYTES {
            self.out.drain(..self.written);
            self.written = 0;
        }
    }

    /// Lets waiting streams open and send.
    fn fill_output(&mut self) {
        self.open_pending();
        while self.backlog() < MAX_OUTPUT_BYTES
            && let Some(key) = self.pending_send.pop_front()
        {
            match self.send_turn(key) {
                Turn::More => self.pending_send.push_back(key),
                Turn::NoCapacity => self.pending_capacity.push_back(key),
                Turn::Done => {
                    if let Some(stream) = self.streams.get(key) {
                        stream.is_queued = false;
                    }
                    self.release_if_closed(key);
                }
            }
        }
    }

    /// Writes a header block: the pseudo-header fields that `before` writes, and a map.
    pub(super) fn put_headers(
        &mut self,
        id: u32,
        end_stream: bool,
        map: &HeaderMap,
        before: impl FnOnce(&mut dyn FnMut(&str, &str)),
    ) {
        let at = self.out.len();
        self.out.extend_from_slice(&[0; HEADER_LEN]);
        let (encoder, out) = (&mut self.encoder, &mut self.out);
        encoder.begin_block(out);
        before(&mut |name, value| {
            encoder.put(out, name.as_bytes(), value.as_bytes(), false, false)
        });
        put_map(encoder, out, map);
        let length = self.out.len() - at - HEADER_LEN;
        let flags = if end_stream { frame::END_STREAM } else { 0 };
        if length <= MAX_PAYLOAD_BYTES {
            let head = Head {
                length,
                kind: frame::HEADERS,
                flags: frame::END_HEADERS | flags,
                stream: id,
            };
            return self.out[at..at + HEADER_LEN].copy_from_slice(&head.bytes());
        }
        let block = self.out.split_off(at + HEADER_LEN);
        self.out.truncate(at);
        let parts = block.chunks(MAX_PAYLOAD_BYTES).len();
        for (number, part) in block.chunks(MAX_PAYLOAD_BYTES).enumerate() {
            let (kind, flags) =
                if number == 0 { (frame::HEADERS, flags) } else { (frame::CONTINUATION, 0) };
            let end_headers = if number + 1 == parts { frame::END_HEADERS } else { 0 };
            frame::put(&mut self.out, kind, flags | end_headers, id, part);
        }
    }

    /// Sends a stream's data, or queues it after others.
    pub(super) fn schedule_send(&mut self, key: Key) {
        let is_alone = self.pending_send.is_empty() && self.pending_capacity.is_empty();
        let Some(stream) = self.streams.get(key) else { return };
        if stream.id == 0 || stream.is_queued {
            return;
        }
        stream.is_queued = true;
        self.pending_send.push_back(key);
        if is_alone {
            self.fill_output();
        }
    }

    /// Writes at most one DATA frame of a stream, and its end.
    fn send_turn(&mut self, key: Key) -> Turn {
        let Some(stream) = self.streams.get(key) else { return Turn::Done };
        if !stream.unsent.is_empty() {
            if stream.send_window <= 0 {
                return Turn::Done;
            }
            if self.send_window <= 0 {
                return Turn::NoCapacity;
            }
            let room =
                usize::try_from(stream.send_window.min(self.send_window)).unwrap_or(usize::MAX);
            let length = stream.unsent.len().min(MAX_PAYLOAD_BYTES).min(room);
            let part = stream.unsent.split_to(length);
            stream.send_window -= length as i64;
            self.send_window -= length as i64;
            let end_stream =
                stream.unsent.is_empty() && matches!(stream.send_state, SendState::Finishing(None));
            let flags = if end_stream { frame::END_STREAM } else { 0 };
            frame::put(&mut self.out, frame::DATA, flags, stream.id, &part);
            if end_stream {
                stream.send_state = SendState::Closed;
            }
            if !stream.unsent.is_empty() {
                return Turn::More;
            }
        }
        stream.wake_send();
        if let SendState::Finishing(trailers) = &mut stream.send_state {
            let (trailers, id) = (trailers.take(), stream.id);
            stream.send_state = SendState::Closed;
            match trailers {
                Some(trailers) => self.put_headers(id, true, &trailers, |_| {}),
                None => frame::put(&mut self.out, frame::DATA, frame::END_STREAM, id, &[]),
            }
        }
        Turn::Done
    }

    /// Sends the next part of a body. The previous part must have been sent.
    pub(crate) fn send_data(&mut self, key: Key, part: Bytes) {
        let Some(stream) =
            self.streams.get(key).filter(|stream| matches!(stream.send_state, SendState::Open))
        else {
            return;
        };
        debug_assert!(stream.unsent.is_empty());
        stream.unsent = part;
        self.schedule_send(key);
        self.wake();
    }

    /// Ends a body, with trailers or without.
    pub(crate) fn finish(&mut self, key: Key, trailers: Option<HeaderMap>) {
        let Some(stream) =
            self.streams.get(key).filter(|stream| matches!(stream.send_state, SendState::Open))
        else {
            return;
        };
        stream.send_state = SendState::Finishing(trailers);
        self.schedule_send(key);
        self.release_if_closed(key);
        self.wake();
    }

    /// Ready when the previous part has been sent. Fails if the peer has reset the stream.
    pub(crate) fn poll_ready(&mut self, key: Key, waker: &Waker) -> Poll<Result<(), Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Err(Error::Aborted)) };
        if let SendState::Closed = stream.send_state {
            return Poll::Ready(Err(stream.error.clone().unwrap_or(Error::Aborted)));
        }
        if stream.unsent.is_empty() && stream.id != 0 {
            return Poll::Ready(Ok(()));
        }
        store_waker(&mut stream.send_task, waker);
        Poll::Pending
    }

    /// Returns the bytes of the last part that are not sent.
    pub(crate) fn unsent_bytes(&mut self, key: Key) -> usize {
        self.streams.get(key).map_or(0, |stream| stream.unsent.len())
    }

    pub(super) fn set_initial_send_window(&mut self, window: u32) -> Result<(), Violation> {
        let too_large = Violation(Reason::FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE exceeds 2^31-1");
        if window > MAX_U31 {
            return Err(too_large);
        }
        let change = i64::from(window) - self.initial_send_window;
        self.initial_send_window = window.into();
        let mut widened = Vec::new();
        for (key, stream) in self.streams.iter().filter(|(_, stream)| stream.id != 0) {
            stream.send_window += change;
            if stream.send_window > MAX_U31.into() {
                return Err(too_large);
            }
            widened.push(key);
        }
        for key in widened.into_iter().filter(|_| change > 0) {
            self.schedule_send(key);
        }
        Ok(())
    }

    pub(super) fn recv_window_update(&mut self, id: u32, by: u32) -> Result<(), Violation> {
        if id == 0 {
            self.send_window += i64::from(by);
            if by == 0 || self.send_window > MAX_U31.into() {
                let what = if by == 0 {
                    "WINDOW_UPDATE of 0"
                } else {
                    "flow-control window exceeds 2^31-1"
                };
                return Err(Violation(
                    if by == 0 { Reason::PROTOCOL_ERROR } else { Reason::FLOW_CONTROL_ERROR },
                    what,
                ));
            }
            self.pending_send.append(&mut self.pending_capacity);
            return Ok(());
        }
        if self.is_idle(id) {
            return Err(Violation(Reason::PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream"));
        }
        let Some(key) = self.streams.key_of(id) else { return Ok(()) };
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        stream.send_window += i64::from(by);
        if by == 0 {
            self.send_reset(key, Reason::PROTOCOL_ERROR, Error::Malformed("WINDOW_UPDATE of 0"));
        } else if stream.send_window > MAX_U31.into() {
            self.send_reset(
                key,
                Reason::FLOW_CONTROL_ERROR,
                Error::Malformed("flow-control window exceeds 2^31-1"),
            );
        } else {
            self.schedule_send(key);
        }
        Ok(())
    }
}

fn put_map(encoder: &mut Encoder, out: &mut Vec<u8>, map: &HeaderMap) {
    for (name, value) in map {
        let varies =
            *name == GRPC_TIMEOUT || *name == GRPC_MESSAGE || *name == header::CONTENT_LENGTH;
        encoder.put(out, name.as_str().as_bytes(), value.as_bytes(), varies, value.is_sensitive());
    }
}
