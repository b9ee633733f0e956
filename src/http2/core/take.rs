//! What came of a stream is taken.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;

use super::Core;
use crate::http2::{
    STREAM_WINDOW,
    error::Error,
    frame,
    stream::{Coming, Stream, keep},
    streams::Key,
};

/// When as much of a stream was taken, the peer is told. Bytes: less than half of the window, and
/// far more than most answers have.
const TOLD: u32 = STREAM_WINDOW / 4;

impl Stream {
    /// There is nothing of it now: an end, or a wait.
    pub(super) fn nothing(&mut self, waker: &Waker) -> Poll<Result<(), Error>> {
        if let Some(error) = &self.error {
            return Poll::Ready(Err(error.clone()));
        }
        if self.coming == Coming::Nothing {
            return Poll::Ready(Ok(()));
        }
        keep(&mut self.receiver, waker);
        Poll::Pending
    }
}

impl Core {
    /// What came of the body since it was asked last.
    pub(in super::super) fn poll_data(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Option<Result<Bytes, Error>>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(None) };
        if stream.body.is_empty() {
            return stream.nothing(waker).map(|end| end.err().map(Err));
        }
        let part = Bytes::from(std::mem::take(&mut stream.body));
        stream.taken += part.len() as u32;
        self.tell_taken(key);
        self.was_taken(part.len());
        Poll::Ready(Some(Ok(part)))
    }

    /// Tells the peer of what was taken of a stream, if that is much, and more may come that
    /// somebody wants.
    pub(super) fn tell_taken(&mut self, key: Key) {
        let Some(stream) = self.streams.get(key) else { return };
        if stream.taken < TOLD || stream.coming == Coming::Nothing || !stream.is_wanted {
            return;
        }
        let taken = std::mem::take(&mut stream.taken);
        stream.recv_window += taken;
        frame::put(&mut self.out, frame::WINDOW_UPDATE, 0, stream.id, &taken.to_be_bytes());
        self.stir();
    }

    /// The trailers, when the body has ended.
    pub(in super::super) fn poll_trailers(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Result<Option<HeaderMap>, Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Ok(None)) };
        match stream.trailers.take() {
            Some(trailers) => Poll::Ready(Ok(Some(trailers))),
            None => stream.nothing(waker).map(|end| end.map(|()| None)),
        }
    }

    /// Whether the answer has ended, and all of it was taken.
    pub(in super::super) fn has_ended(&mut self, key: Key) -> bool {
        self.streams.get(key).is_none_or(|stream| {
            stream.coming == Coming::Nothing
                && stream.body.is_empty()
                && stream.trailers.is_none()
                && stream.error.is_none()
        })
    }
}
