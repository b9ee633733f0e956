//! What a server hears and answers.

use std::{
    collections::{HashSet, VecDeque},
    task::{Context, Poll},
};

use http::{HeaderMap, Request, StatusCode, response};

use super::{
    Core, Role,
    fields::{Fields, TOO_LONG},
};
use crate::http2::{
    RESET_STREAMS, Reason,
    error::{Error, Violation},
    frame::{self, MAX_31},
    stream::{Coming, Going, Stream, keep, promised},
    streams::Key,
};

/// What is in the PING whose answer says that a client has heard of the end to come.
const LAST_CALL: &[u8; 8] = b"lastcall";

/// How far the end of a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// The client was told, and may have sent calls before it heard.
    Told,
    /// The client was told that this call was the last.
    Last(u32),
}

/// What is a server's alone.
#[derive(Debug)]
pub(super) struct Asked {
    /// Whether the client's preface came.
    begun: bool,
    /// Calls that came and were not accepted yet. Accepted whenever something was read.
    came: VecDeque<(Key, Request<()>)>,
    /// Streams that we ended before the client had. What comes of them was under way.
    reset: HashSet<u32>,
    /// The same, oldest first.
    in_order: VecDeque<u32>,
    leaving: Leaving,
}

impl Asked {
    pub(super) fn has_reset(&mut self, id: u32) {
        if self.in_order.len() >= RESET_STREAMS
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.reset.remove(&oldest);
        }
        if self.reset.insert(id) {
            self.in_order.push_back(id);
        }
    }
}

impl Core {
    /// Of a server that allows so many streams at once.
    pub(in super::super) fn of_server(max_open: u32) -> Self {
        let asked = Asked {
            begun: false,
            came: VecDeque::new(),
            reset: HashSet::new(),
            in_order: VecDeque::new(),
            leaving: Leaving::No,
        };
        Self::new(Role::Server(asked), Vec::new(), (3, max_open), max_open as usize)
    }

    /// Takes the preface with which a client begins off the front of what came. Whether it came
    /// whole, or long before.
    pub(super) fn take_preface(&mut self, bytes: &mut &[u8]) -> Result<bool, Violation> {
        let Role::Server(asked) = &mut self.role else { return Ok(true) };
        if asked.begun {
            return Ok(true);
        }
        let came = bytes.len().min(frame::PREFACE.len());
        if bytes[..came] != frame::PREFACE[..came] {
            return Err(Violation(Reason::PROTOCOL_ERROR, "it does not begin as HTTP/2 does"));
        }
        if came == frame::PREFACE.len() {
            *bytes = &bytes[came..];
            asked.begun = true;
        }
        Ok(asked.begun)
    }

    /// A call that came. One that was cancelled already is none.
    pub(in super::super) fn accept(&mut self) -> Option<(Key, Request<()>)> {
        loop {
            let Role::Server(asked) = &mut self.role else { return None };
            let (key, request) = asked.came.pop_front()?;
            let stream = self.streams.get(key)?;
            if !stream.was_cut {
                return Some((key, request));
            }
            stream.handles = 0;
            self.settle(key);
        }
    }

    /// Whether the peer may open this stream now.
    pub(super) fn may_be_opened(&self, id: u32) -> bool {
        self.is_server() && !id.is_multiple_of(2) && id >= self.next_id
    }

    /// Takes the header block that a stream begins with.
    pub(super) fn asked(&mut self, id: u32, ends: bool, fields: Fields) {
        self.next_id = id + 2;
        let Role::Server(asked) = &mut self.role else { return };
        if let Leaving::Last(_) = asked.leaving {
            // The client knows that nothing is done with it.
            return asked.has_reset(id);
        }
        if self.open() >= self.max_open {
            return self.put_reset(id, Reason::REFUSED_STREAM, !ends);
        }
        let mut stream = Stream::new(self.first_send_window);
        stream.id = id;
        stream.coming = if ends { Coming::Nothing } else { Coming::Body };
        let request = fields.request().and_then(|request| {
            stream.promised = promised(request.headers())?;
            if stream.keeps_promise(0, ends) {
                Ok(request)
            } else {
                Err("its content-length is not its length")
            }
        });
        match request {
            Ok(request) => {
                let key = self.streams.add(stream);
                self.streams.name(key, id);
                if let Role::Server(asked) = &mut self.role {
                    asked.came.push_back((key, request));
                }
            }
            Err(why) => {
                tracing::debug!(stream = id, why, "a request is malformed");
                if why == TOO_LONG {
                    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                    self.put_headers(id, true, &HeaderMap::new(), |put| {
                        put(":status", status.as_str())
                    });
                    if !ends {
                        self.put_reset(id, Reason::NO_ERROR, true);
                    }
                } else {
                    self.put_reset(id, Reason::PROTOCOL_ERROR, !ends);
                }
            }
        }
    }

    /// Something came of a stream that is no more.
    pub(super) fn after_the_end(&mut self, id: u32, kind: u8) -> Result<(), Violation> {
        let Role::Server(asked) = &self.role else { return Ok(()) };
        if asked.reset.contains(&id) {
            return Ok(());
        }
        if kind == frame::HEADERS {
            return Err(Violation(Reason::STREAM_CLOSED, "a stream begins again behind its end"));
        }
        self.put_reset(id, Reason::STREAM_CLOSED, false);
        Ok(())
    }

    /// Begins an answer; `ended` if there is nothing more of it. An error if the caller has gone.
    pub(in super::super) fn respond(
        &mut self,
        key: Key,
        head: &response::Parts,
        ended: bool,
    ) -> Result<(), Error> {
        let Some(stream) = self.streams.get(key) else { return Err(Error::GivenUp) };
        if !matches!(stream.going, Going::Open) {
            return Err(stream.error.clone().unwrap_or(Error::GivenUp));
        }
        let id = stream.id;
        if ended {
            stream.going = Going::Nothing;
        }
        self.put_headers(id, ended, &head.headers, |put| put(":status", head.status.as_str()));
        if ended {
            self.settle(key);
        }
        Ok(())
    }

    /// Ready when the client wants no answer any more.
    pub(in super::super) fn poll_gone(&mut self, key: Key, cx: &Context<'_>) -> Poll<()> {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.was_cut) else {
            return Poll::Ready(());
        };
        keep(&mut stream.receiver, cx.waker());
        Poll::Pending
    }

    /// Tells the client that it should send no more calls here. Those that it sends before it has
    /// heard are taken as well.
    pub(in super::super) fn drain(&mut self) {
        let Role::Server(asked) = &mut self.role else { return };
        if asked.leaving == Leaving::No {
            asked.leaving = Leaving::Told;
            self.put_goaway(MAX_31, Reason::NO_ERROR, "");
            frame::put(&mut self.out, frame::PING, 0, 0, LAST_CALL);
        }
    }

    /// An answer to a PING came.
    pub(super) fn ponged(&mut self, payload: &[u8]) {
        let last = self.last_of_peer();
        if let Role::Server(asked) = &mut self.role
            && asked.leaving == Leaving::Told
            && payload == LAST_CALL
        {
            asked.leaving = Leaving::Last(last);
            self.leaving.get_or_insert(Error::GivenUp);
            self.put_goaway(last, Reason::NO_ERROR, "");
        }
    }

    /// The last stream that something is done with, or was. Never a later one than the client was
    /// told before (RFC 9113, 6.8).
    pub(super) fn last_of_peer(&self) -> u32 {
        match &self.role {
            Role::Client => 0,
            Role::Server(Asked { leaving: Leaving::Last(last), .. }) => *last,
            Role::Server(_) => self.next_id.saturating_sub(2),
        }
    }
}

#[cfg(test)]
mod tests;
