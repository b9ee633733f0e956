//! Client role: requests sent and responses received.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::{Method, Response, StatusCode, request::Parts};

use super::{Core, MAX_OUTPUT_BYTES, Role, fields::Fields};
use crate::{
    Reason,
    error::Error,
    frame::{self, MAX_U31},
    stream::{RecvState, SendState, Stream, content_length},
    streams::Key,
};

impl Core {
    /// Returns a client's core.
    pub(crate) fn client() -> Self {
        // ENABLE_PUSH is 0.
        Self::new(Role::Client, frame::PREFACE.to_vec(), (2, 0), usize::MAX)
    }

    /// Opens a stream with a request and the first part of its body, or all of it if `end_stream`.
    /// On an error nothing has been sent.
    pub(crate) fn send_request(
        &mut self,
        head: &Parts,
        body: &Bytes,
        end_stream: bool,
    ) -> Result<Key, Error> {
        if self.next_id as usize + 2 * self.pending_open.len() > MAX_U31 as usize {
            self.closing.get_or_insert(Error::NotSent);
            self.wake();
        }
        if let Some(error) = &self.closing {
            return Err(error.clone());
        }
        let mut stream = Stream::new(self.initial_send_window);
        stream.unsent = body.clone();
        stream.has_no_body = head.method == Method::HEAD;
        if end_stream {
            stream.send_state = SendState::Finishing(None);
        }
        let key = self.streams.insert(stream);
        if self.pending_open.is_empty() && self.can_open() {
            self.open_stream(key, head);
        } else {
            if let Some(stream) = self.streams.get(key) {
                stream.request = Some(Box::new(head.clone()));
            }
            self.pending_open.push_back(key);
        }
        self.wake();
        Ok(key)
    }

    fn can_open(&self) -> bool {
        self.open_streams() < self.max_open && self.backlog() < MAX_OUTPUT_BYTES
    }

    /// Opens waiting streams as far as the limits allow.
    pub(super) fn open_pending(&mut self) {
        while !self.pending_open.is_empty()
            && self.can_open()
            && let Some(key) = self.pending_open.pop_front()
        {
            if let Some(head) = self.streams.get(key).and_then(|stream| stream.request.take()) {
                self.open_stream(key, &head);
            }
        }
    }

    fn open_stream(&mut self, key: Key, head: &Parts) {
        let Some(stream) = self.streams.get(key) else { return };
        let id = self.next_id;
        self.next_id += 2;
        (stream.id, stream.send_window) = (id, self.initial_send_window);
        let end_stream =
            stream.unsent.is_empty() && matches!(stream.send_state, SendState::Finishing(None));
        if end_stream {
            stream.send_state = SendState::Closed;
        }
        self.streams.set_id(key, id);
        self.put_headers(id, end_stream, &head.headers, |put| {
            put(":method", head.method.as_str());
            put(":scheme", head.uri.scheme_str().unwrap_or("http"));
            if let Some(authority) = head.uri.authority() {
                put(":authority", authority.as_str());
            }
            put(":path", head.uri.path_and_query().map_or("/", |path| path.as_str()));
        });
        if !end_stream {
            self.schedule_send(key);
        }
    }

    /// Returns the head of the response.
    pub(crate) fn poll_response(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Result<Response<()>, Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Err(Error::Aborted)) };
        match stream.head.take() {
            Some(head) => Poll::Ready(Ok(head)),
            None => stream.poll_closed(waker).map(|end| Err(end.err().unwrap_or(Error::Aborted))),
        }
    }

    /// Receives the header block of a response, final or informational.
    pub(super) fn recv_response(
        &mut self,
        key: Key,
        end_stream: bool,
        fields: Fields,
    ) -> Result<(), &'static str> {
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let Some(status) = fields.response_status()? else {
            return Err("response without :status");
        };
        if status.is_informational() {
            return if end_stream { Err("informational response with END_STREAM") } else { Ok(()) };
        }
        stream.content_length = content_length(&fields.map)?
            .filter(|_| !stream.has_no_body && status != StatusCode::NOT_MODIFIED);
        if !stream.matches_content_length(0, end_stream) {
            return Err("body length differs from content-length");
        }
        let mut head = Response::new(());
        *head.status_mut() = status;
        *head.headers_mut() = fields.map;
        *head.version_mut() = http::Version::HTTP_2;
        stream.head = Some(head);
        stream.recv_state = if end_stream { RecvState::Closed } else { RecvState::Body };
        stream.wake_recv();
        if end_stream {
            self.release_if_closed(key);
        }
        Ok(())
    }

    /// Receives a GOAWAY: the server ignores streams after `last`.
    pub(super) fn recv_server_go_away(&mut self, last: u32, reason: Reason) {
        let error = Error::GoAway(reason);
        self.closing.get_or_insert(error.clone());
        let all = self.streams.iter().filter(|(_, stream)| stream.id == 0 || stream.id > last);
        let not_begun: Vec<Key> =
            all.filter(|(_, stream)| !stream.is_closed()).map(|(key, _)| key).collect();
        for key in not_begun {
            if let Some(stream) = self.streams.get(key) {
                stream.abort(error.clone());
            }
            self.release_if_closed(key);
        }
        self.pending_open.clear();
    }
}
