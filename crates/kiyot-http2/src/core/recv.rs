//! What came of a stream is taken.

use std::task::{Poll, Waker};

use bytes::Bytes;
use http::HeaderMap;

use super::Core;
use crate::{
    STREAM_WINDOW_BYTES,
    error::Error,
    frame,
    stream::{RecvState, Stream, store_waker},
    streams::Key,
};

/// When as much of a stream was taken, the peer is told. Bytes: less than half of the window, and
/// far more than most answers have.
const MIN_STREAM_UPDATE_BYTES: u32 = STREAM_WINDOW_BYTES / 4;

impl Stream {
    /// There is nothing of it now: an end, or a wait.
    pub(super) fn poll_closed(&mut self, waker: &Waker) -> Poll<Result<(), Error>> {
        if let Some(error) = &self.error {
            return Poll::Ready(Err(error.clone()));
        }
        if self.recv_state == RecvState::Closed {
            return Poll::Ready(Ok(()));
        }
        store_waker(&mut self.recv_task, waker);
        Poll::Pending
    }
}

impl Core {
    /// What came of the body since it was asked last.
    pub(crate) fn poll_data(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Option<Result<Bytes, Error>>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(None) };
        if stream.recv_buffer.is_empty() {
            return stream.poll_closed(waker).map(|end| end.err().map(Err));
        }
        let part = Bytes::from(std::mem::take(&mut stream.recv_buffer));
        stream.unclaimed += part.len() as u32;
        self.update_stream_window(key);
        self.release_connection_capacity(part.len());
        Poll::Ready(Some(Ok(part)))
    }

    /// Tells the peer of what was taken of a stream, if that is much, and more may come that
    /// somebody wants.
    pub(super) fn update_stream_window(&mut self, key: Key) {
        let Some(stream) = self.streams.get(key) else { return };
        if stream.unclaimed < MIN_STREAM_UPDATE_BYTES
            || stream.recv_state == RecvState::Closed
            || !stream.wants_body
        {
            return;
        }
        let unclaimed = std::mem::take(&mut stream.unclaimed);
        stream.recv_window += unclaimed;
        frame::put(&mut self.out, frame::WINDOW_UPDATE, 0, stream.id, &unclaimed.to_be_bytes());
        self.wake();
    }

    /// The trailers, when the body has ended.
    pub(crate) fn poll_trailers(
        &mut self,
        key: Key,
        waker: &Waker,
    ) -> Poll<Result<Option<HeaderMap>, Error>> {
        let Some(stream) = self.streams.get(key) else { return Poll::Ready(Ok(None)) };
        match stream.trailers.take() {
            Some(trailers) => Poll::Ready(Ok(Some(trailers))),
            None => stream.poll_closed(waker).map(|end| end.map(|()| None)),
        }
    }

    /// Whether the answer has ended, and all of it was taken.
    pub(crate) fn is_end_stream(&mut self, key: Key) -> bool {
        self.streams.get(key).is_none_or(|stream| {
            stream.recv_state == RecvState::Closed
                && stream.recv_buffer.is_empty()
                && stream.trailers.is_none()
                && stream.error.is_none()
        })
    }
}
