//! What a client begins and hears.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{Method, Response, StatusCode, request::Parts};

use super::{Core, OUTPUT, Role, fields::Fields};
use crate::http2::{
    Reason,
    error::Error,
    frame::{self, MAX_31},
    stream::{Coming, Going, Stream, promised},
    streams::Key,
};

impl Core {
    /// Of a client.
    pub(in super::super) fn of_client() -> Self {
        // Nothing is to be pushed.
        Self::new(Role::Client, frame::PREFACE.to_vec(), (2, 0), usize::MAX)
    }

    /// Begins a call, with what there is of its body; `ended` if that is all. An error if there are
    /// no new calls here: nothing was sent then.
    pub(in super::super) fn request(
        &mut self,
        head: &Parts,
        body: &Bytes,
        ended: bool,
    ) -> Result<Key, Error> {
        if self.next_id as usize + 2 * self.waiting.len() > MAX_31 as usize {
            self.leaving.get_or_insert(Error::NotSent);
            self.stir();
        }
        if let Some(error) = &self.leaving {
            return Err(error.clone());
        }
        let mut stream = Stream::new(self.first_send_window);
        stream.unsent = body.clone();
        stream.has_no_body = head.method == Method::HEAD;
        if ended {
            stream.going = Going::Given(None);
        }
        let key = self.streams.add(stream);
        if self.waiting.is_empty() && self.may_open() {
            self.begin(key, head);
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
        self.open() < self.max_open && self.backlog() < OUTPUT
    }

    /// Opens what waits, as far as it may.
    pub(super) fn open_waiting(&mut self) {
        while !self.waiting.is_empty()
            && self.may_open()
            && let Some(key) = self.waiting.pop_front()
        {
            if let Some(head) = self.streams.get(key).and_then(|stream| stream.request.take()) {
                self.begin(key, &head);
            }
        }
    }

    fn begin(&mut self, key: Key, head: &Parts) {
        let Some(stream) = self.streams.get(key) else { return };
        let id = self.next_id;
        self.next_id += 2;
        (stream.id, stream.send_window) = (id, self.first_send_window);
        let ends = stream.unsent.is_empty() && matches!(stream.going, Going::Given(None));
        if ends {
            stream.going = Going::Nothing;
        }
        self.streams.name(key, id);
        self.put_headers(id, ends, &head.headers, |put| {
            put(":method", head.method.as_str());
            put(":scheme", head.uri.scheme_str().unwrap_or("http"));
            if let Some(authority) = head.uri.authority() {
                put(":authority", authority.as_str());
            }
            put(":path", head.uri.path_and_query().map_or("/", |path| path.as_str()));
        });
        if !ends {
            self.send(key);
        }
    }

    /// The head of the answer.
    pub(in super::super) fn poll_head(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Result<Response<()>, Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Err(Error::GivenUp)) };
        match stream.head.take() {
            Some(head) => Poll::Ready(Ok(head)),
            None => stream.nothing(waker).map(|end| Err(end.err().unwrap_or(Error::GivenUp))),
        }
    }

    /// Takes a header block in which an answer begins, or a part of what goes before one.
    pub(super) fn answered(
        &mut self,
        key: Key,
        ends: bool,
        fields: Fields,
    ) -> Result<(), &'static str> {
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let Some(status) = fields.answer()? else { return Err("it has no status") };
        if status.is_informational() {
            return if ends { Err("it ends before it begins") } else { Ok(()) };
        }
        stream.promised = promised(&fields.map)?
            .filter(|_| !stream.has_no_body && status != StatusCode::NOT_MODIFIED);
        if !stream.keeps_promise(0, ends) {
            return Err("its content-length is not its length");
        }
        let mut head = Response::new(());
        *head.status_mut() = status;
        *head.headers_mut() = fields.map;
        *head.version_mut() = http::Version::HTTP_2;
        stream.head = Some(head);
        stream.coming = if ends { Coming::Nothing } else { Coming::Body };
        stream.wake_receiver();
        if ends {
            self.settle(key);
        }
        Ok(())
    }

    /// The server takes no new calls, and does nothing with those from `last` on.
    pub(super) fn server_goes_away(&mut self, last: u32, reason: Reason) {
        let error = Error::GoneAway(reason);
        self.leaving.get_or_insert(error.clone());
        let all = self.streams.iter().filter(|(_, stream)| stream.id == 0 || stream.id > last);
        let not_begun: Vec<Key> =
            all.filter(|(_, stream)| !stream.is_over()).map(|(key, _)| key).collect();
        for key in not_begun {
            if let Some(stream) = self.streams.get(key) {
                stream.end(error.clone());
            }
            self.settle(key);
        }
        self.waiting.clear();
    }
}
