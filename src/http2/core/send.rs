//! What is written, as far as the peer's windows and the room for it allow.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, header};

use super::{BACKLOG, Core, OUTPUT};
use crate::http2::{
    Reason,
    error::{Error, Violation},
    frame::{self, HEAD, Head, MAX_31, MAX_PAYLOAD},
    hpack::Encoder,
    stream::{Going, keep},
    streams::Key,
};

/// What is different in each call.
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What became of the turn of a stream.
enum Turn {
    /// It could send more at once.
    More,
    /// It waits for its window or for more to be given, or has ended.
    Done,
    /// It waits for the connection's window.
    Starved,
}

impl Core {
    /// What waits to be written. Bytes.
    pub(in super::super) fn backlog(&self) -> usize {
        self.out.len() - self.written
    }

    /// Whether the peer is to be read from: not while it doesn't read itself.
    pub(in super::super) fn may_read(&self) -> bool {
        self.backlog() < BACKLOG
    }

    /// What is to be written now. Empty if there is nothing.
    pub(in super::super) fn output(&mut self) -> &[u8] {
        self.fill();
        &self.out[self.written..]
    }

    /// So many bytes of it were written.
    pub(in super::super) fn wrote(&mut self, length: usize) {
        self.written += length;
        self.unwritten_id = self.next_id;
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
            // What was once much is not kept.
            self.out.shrink_to(2 * OUTPUT);
        } else if self.written >= OUTPUT {
            self.out.drain(..self.written);
            self.written = 0;
        }
    }

    /// Lets streams send that could not.
    fn fill(&mut self) {
        self.open_waiting();
        while self.backlog() < OUTPUT
            && let Some(key) = self.sending.pop_front()
        {
            match self.turn(key) {
                Turn::More => self.sending.push_back(key),
                Turn::Starved => self.starved.push_back(key),
                Turn::Done => {
                    if let Some(stream) = self.streams.get(key) {
                        stream.is_queued = false;
                    }
                    self.settle(key);
                }
            }
        }
    }

    /// Writes a header block: what `before` puts, and a map.
    pub(super) fn put_headers(
        &mut self,
        id: u32,
        ends: bool,
        map: &HeaderMap,
        before: impl FnOnce(&mut dyn FnMut(&str, &str)),
    ) {
        let at = self.out.len();
        self.out.extend_from_slice(&[0; HEAD]);
        let (encoder, out) = (&mut self.encoder, &mut self.out);
        encoder.begin(out);
        before(&mut |name, value| {
            encoder.put(out, name.as_bytes(), value.as_bytes(), false, false)
        });
        put_map(encoder, out, map);
        let length = self.out.len() - at - HEAD;
        let end_stream = if ends { frame::END_STREAM } else { 0 };
        if length <= MAX_PAYLOAD {
            let head = Head {
                length,
                kind: frame::HEADERS,
                flags: frame::END_HEADERS | end_stream,
                stream: id,
            };
            return self.out[at..at + HEAD].copy_from_slice(&head.bytes());
        }
        let block = self.out.split_off(at + HEAD);
        self.out.truncate(at);
        let parts = block.chunks(MAX_PAYLOAD).len();
        for (number, part) in block.chunks(MAX_PAYLOAD).enumerate() {
            let (kind, flags) =
                if number == 0 { (frame::HEADERS, end_stream) } else { (frame::CONTINUATION, 0) };
            let end_headers = if number + 1 == parts { frame::END_HEADERS } else { 0 };
            frame::put(&mut self.out, kind, flags | end_headers, id, part);
        }
    }

    /// Sends of a stream what can be sent, or queues it behind others.
    pub(super) fn send(&mut self, key: Key) {
        let is_alone = self.sending.is_empty() && self.starved.is_empty();
        let Some(stream) = self.streams.get(key) else { return };
        if stream.id == 0 || stream.is_queued {
            return;
        }
        stream.is_queued = true;
        self.sending.push_back(key);
        if is_alone {
            self.fill();
        }
    }

    /// Writes one frame of a stream at most, and its end.
    fn turn(&mut self, key: Key) -> Turn {
        let Some(stream) = self.streams.get(key) else { return Turn::Done };
        if !stream.unsent.is_empty() {
            if stream.send_window <= 0 {
                return Turn::Done;
            }
            if self.send_window <= 0 {
                return Turn::Starved;
            }
            let room =
                usize::try_from(stream.send_window.min(self.send_window)).unwrap_or(usize::MAX);
            let length = stream.unsent.len().min(MAX_PAYLOAD).min(room);
            let part = stream.unsent.split_to(length);
            stream.send_window -= length as i64;
            self.send_window -= length as i64;
            let ends = stream.unsent.is_empty() && matches!(stream.going, Going::Given(None));
            let flags = if ends { frame::END_STREAM } else { 0 };
            frame::put(&mut self.out, frame::DATA, flags, stream.id, &part);
            if ends {
                stream.going = Going::Nothing;
            }
            if !stream.unsent.is_empty() {
                return Turn::More;
            }
        }
        stream.wake_sender();
        if let Going::Given(trailers) = &mut stream.going {
            let (trailers, id) = (trailers.take(), stream.id);
            stream.going = Going::Nothing;
            match trailers {
                Some(trailers) => self.put_headers(id, true, &trailers, |_| {}),
                None => frame::put(&mut self.out, frame::DATA, frame::END_STREAM, id, &[]),
            }
        }
        Turn::Done
    }

    /// Gives the next part of a body; the one before must have been sent.
    pub(in super::super) fn give(&mut self, key: Key, part: Bytes) {
        let Some(stream) =
            self.streams.get(key).filter(|stream| matches!(stream.going, Going::Open))
        else {
            return;
        };
        debug_assert!(stream.unsent.is_empty());
        stream.unsent = part;
        self.send(key);
        self.stir();
    }

    /// Says that what was given is all, but for trailers.
    pub(in super::super) fn give_end(&mut self, key: Key, trailers: Option<HeaderMap>) {
        let Some(stream) =
            self.streams.get(key).filter(|stream| matches!(stream.going, Going::Open))
        else {
            return;
        };
        stream.going = Going::Given(trailers);
        self.send(key);
        self.settle(key);
        self.stir();
    }

    /// Ready when all that was given was sent; an error if the peer wants no more.
    pub(in super::super) fn poll_sent(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Result<(), Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Err(Error::GivenUp)) };
        if let Going::Nothing = stream.going {
            return Poll::Ready(Err(stream.error.clone().unwrap_or(Error::GivenUp)));
        }
        if stream.unsent.is_empty() && stream.id != 0 {
            return Poll::Ready(Ok(()));
        }
        keep(&mut stream.sender, waker);
        Poll::Pending
    }

    /// How much of what was given last was not sent. Bytes.
    pub(in super::super) fn unsent(&mut self, key: Key) -> usize {
        self.streams.get(key).map_or(0, |stream| stream.unsent.len())
    }

    pub(super) fn set_first_send_window(&mut self, window: u32) -> Result<(), Violation> {
        let too_large = Violation(Reason::FLOW_CONTROL_ERROR, "it sets a window that is too large");
        if window > MAX_31 {
            return Err(too_large);
        }
        let change = i64::from(window) - self.first_send_window;
        self.first_send_window = window.into();
        let mut widened = Vec::new();
        for (key, stream) in self.streams.iter().filter(|(_, stream)| stream.id != 0) {
            stream.send_window += change;
            if stream.send_window > MAX_31.into() {
                return Err(too_large);
            }
            widened.push(key);
        }
        for key in widened.into_iter().filter(|_| change > 0) {
            self.send(key);
        }
        Ok(())
    }

    pub(super) fn window_update(&mut self, id: u32, by: u32) -> Result<(), Violation> {
        if id == 0 {
            self.send_window += i64::from(by);
            if by == 0 || self.send_window > MAX_31.into() {
                let what = if by == 0 {
                    "it widens the window by nothing"
                } else {
                    "it widens the window too far"
                };
                return Err(Violation(
                    if by == 0 { Reason::PROTOCOL_ERROR } else { Reason::FLOW_CONTROL_ERROR },
                    what,
                ));
            }
            self.sending.append(&mut self.starved);
            return Ok(());
        }
        if self.is_idle(id) {
            return Err(Violation(
                Reason::PROTOCOL_ERROR,
                "it widens the window of a stream that was not opened",
            ));
        }
        let Some(key) = self.streams.of_id(id) else { return Ok(()) };
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        stream.send_window += i64::from(by);
        if by == 0 {
            self.reset(
                key,
                Reason::PROTOCOL_ERROR,
                Error::Malformed("it widens the window by nothing"),
            );
        } else if stream.send_window > MAX_31.into() {
            self.reset(
                key,
                Reason::FLOW_CONTROL_ERROR,
                Error::Malformed("it widens the window too far"),
            );
        } else {
            self.send(key);
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
