//! Data, trailers and ends read by a stream's user.

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

/// Released capacity at which a stream's WINDOW_UPDATE is sent: less than half of the window, and
/// far more than most responses have.
const MIN_STREAM_UPDATE_BYTES: u32 = STREAM_WINDOW_BYTES / 4;

impl Stream {
    /// Ready at the stream's end or error.
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
    /// Returns the data received since the last call.
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

    /// Sends a WINDOW_UPDATE if much capacity is released, more data may follow, and the data has a
    /// reader.
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

    /// Returns the trailers after the end of the body.
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

    /// Returns whether the stream has ended without an error, and everything is read.
    pub(crate) fn is_end_stream(&mut self, key: Key) -> bool {
        self.streams.get(key).is_none_or(|stream| {
            stream.recv_state == RecvState::Closed
                && stream.recv_buffer.is_empty()
                && stream.trailers.is_none()
                && stream.error.is_none()
        })
    }
}
