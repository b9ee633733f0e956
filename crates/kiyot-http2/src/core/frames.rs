//! Effects of received frames.

use super::{Core, Role, fields::Fields};
use crate::{
    MAX_HEADER_LIST_BYTES, Reason,
    error::{Error, Violation},
    frame::{self, HEADER_LEN, Head, MAX_PAYLOAD_BYTES, MAX_U31},
    stream::RecvState,
    streams::Key,
};

/// Most frames of a header block. The longest block fits if its frames are half full.
const MAX_BLOCK_FRAMES: usize = 2 * MAX_HEADER_LIST_BYTES as usize / MAX_PAYLOAD_BYTES;

/// Header block whose END_HEADERS has not arrived.
#[derive(Debug)]
pub(super) struct HeaderBlock {
    stream: u32,
    end_stream: bool,
    bytes: Vec<u8>,
    parts: usize,
}

fn protocol_error<T>(what: &'static str) -> Result<T, Violation> {
    Err(Violation(Reason::PROTOCOL_ERROR, what))
}

fn check_length(head: Head, is: usize) -> Result<(), Violation> {
    if head.length == is {
        Ok(())
    } else {
        Err(Violation(Reason::FRAME_SIZE_ERROR, "frame length does not match its type"))
    }
}

impl Core {
    /// Receives complete frames and returns their bytes. After an error the connection has ended.
    pub(crate) fn recv(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        let mut rest = bytes;
        if !self.recv_preface(&mut rest)? {
            return Ok(0);
        }
        while let Some(head) = Head::parse(rest) {
            if head.length > MAX_PAYLOAD_BYTES {
                return Err(Violation(Reason::FRAME_SIZE_ERROR, "frame exceeds 16384 bytes"));
            }
            let Some((payload, behind)) = rest[HEADER_LEN..].split_at_checked(head.length) else {
                break;
            };
            self.recv_frame(head, payload)?;
            self.frames += 1;
            rest = behind;
        }
        Ok(bytes.len() - rest.len())
    }

    /// Receives a frame. After an error the connection has ended.
    pub(crate) fn recv_frame(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        if let Some(block) = &mut self.block {
            if head.kind != frame::CONTINUATION || head.stream != block.stream {
                return protocol_error("header block interrupted by another frame");
            }
            block.parts += 1;
            if block.bytes.len() + payload.len() > MAX_HEADER_LIST_BYTES as usize
                || block.parts > MAX_BLOCK_FRAMES
            {
                return Err(Violation(Reason::ENHANCE_YOUR_CALM, "header block exceeds its limit"));
            }
            block.bytes.extend_from_slice(payload);
            if head.has(frame::END_HEADERS)
                && let Some(block) = self.block.take()
            {
                return self.recv_headers(block.stream, block.end_stream, &block.bytes);
            }
            return Ok(());
        }
        if !self.received_settings {
            if head.kind != frame::SETTINGS || head.has(frame::ACK) {
                return protocol_error("first frame is not SETTINGS");
            }
            self.received_settings = true;
        }
        if matches!(head.kind, frame::SETTINGS | frame::PING | frame::GOAWAY) && head.stream != 0 {
            return protocol_error("connection frame with a stream id");
        }
        if matches!(head.kind, frame::DATA | frame::HEADERS | frame::RST_STREAM)
            && self.is_idle(head.stream)
            && !(head.kind == frame::HEADERS && self.can_peer_open(head.stream))
        {
            return protocol_error("frame on an idle stream");
        }
        match head.kind {
            frame::DATA => self.recv_data(head, frame::strip_padding(head, payload)?),
            frame::HEADERS => {
                let bytes = frame::strip_padding(head, payload)?;
                let end_stream = head.has(frame::END_STREAM);
                if head.has(frame::END_HEADERS) {
                    return self.recv_headers(head.stream, end_stream, bytes);
                }
                self.block = Some(HeaderBlock {
                    stream: head.stream,
                    end_stream,
                    bytes: bytes.to_vec(),
                    parts: 1,
                });
                Ok(())
            }
            frame::RST_STREAM => {
                check_length(head, 4)?;
                if let Some(key) = self.streams.key_of(head.stream) {
                    if let Some(stream) = self.streams.get(key) {
                        stream.abort(Error::Reset(frame::be_u32(payload).into()));
                    }
                    self.release_if_closed(key);
                }
                Ok(())
            }
            frame::SETTINGS if head.has(frame::ACK) => check_length(head, 0),
            frame::SETTINGS => self.recv_settings(payload),
            frame::PUSH_PROMISE => protocol_error("PUSH_PROMISE although push is disabled"),
            frame::PING => {
                check_length(head, 8)?;
                if head.has(frame::ACK) {
                    self.recv_ping_ack(payload);
                } else {
                    frame::put(&mut self.out, frame::PING, frame::ACK, 0, payload);
                }
                Ok(())
            }
            frame::GOAWAY if head.length < 8 => check_length(head, 8),
            frame::GOAWAY => {
                self.recv_go_away(
                    frame::be_u32(payload) & MAX_U31,
                    frame::be_u32(&payload[4..]).into(),
                );
                Ok(())
            }
            frame::WINDOW_UPDATE => {
                check_length(head, 4)?;
                self.recv_window_update(head.stream, frame::be_u32(payload) & MAX_U31)
            }
            frame::CONTINUATION => protocol_error("CONTINUATION without HEADERS"),
            // Priorities are deprecated (RFC 9113, 5.3.2).
            frame::PRIORITY if head.stream == 0 => protocol_error("PRIORITY without a stream id"),
            frame::PRIORITY if frame::be_u32(payload) & MAX_U31 == head.stream => {
                protocol_error("stream depends on itself")
            }
            frame::PRIORITY => check_length(head, 5),
            // Unknown frames are ignored.
            _ => Ok(()),
        }
    }

    fn recv_data(&mut self, head: Head, data: &[u8]) -> Result<(), Violation> {
        let overrun = Violation(Reason::FLOW_CONTROL_ERROR, "data exceeds the flow-control window");
        let length = head.length as u32;
        self.recv_window = self.recv_window.checked_sub(length).ok_or(overrun)?;
        // Frames of a closed stream arrive for a while. Padding has no reader.
        let Some(key) = self.streams.key_of(head.stream) else {
            self.release_connection_capacity(head.length);
            return self.recv_on_closed(head.stream, head.kind);
        };
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let end_stream = head.has(frame::END_STREAM);
        let matches_content_length = stream.matches_content_length(data.len(), end_stream);
        let wrong = match stream.recv_state {
            RecvState::Body if matches_content_length => None,
            RecvState::Body => {
                Some((Reason::PROTOCOL_ERROR, "body length differs from content-length"))
            }
            RecvState::Head => Some((Reason::PROTOCOL_ERROR, "DATA before HEADERS")),
            RecvState::Closed => Some((Reason::STREAM_CLOSED, "frame after END_STREAM")),
        };
        if let Some((reason, why)) = wrong {
            self.release_connection_capacity(head.length);
            self.send_reset(key, reason, Error::Malformed(why));
            return Ok(());
        }
        stream.recv_window = stream.recv_window.checked_sub(length).ok_or(overrun)?;
        let kept = if stream.wants_body { data } else { &[] };
        stream.unclaimed += (head.length - kept.len()) as u32;
        // A frame without data matters only if it ends the stream.
        stream.recv_buffer.extend_from_slice(kept);
        if end_stream {
            stream.recv_state = RecvState::Closed;
        }
        if end_stream || !kept.is_empty() {
            stream.wake_recv();
        }
        let padding = head.length - kept.len();
        self.release_connection_capacity(padding);
        if end_stream {
            self.release_if_closed(key);
        } else if padding > 0 {
            self.update_stream_window(key);
        }
        Ok(())
    }

    fn recv_headers(&mut self, id: u32, end_stream: bool, block: &[u8]) -> Result<(), Violation> {
        let key = self.streams.key_of(id);
        let begins = self.can_peer_open(id);
        let mut fields = Fields::default();
        // The block is decoded in any case, because it changes the dynamic table.
        self.decoder.decode(block, |field| {
            if key.is_some() || begins {
                fields.add(field);
            }
        })?;
        match key {
            Some(key) => {
                let goes_on = self.streams.get(key).map(|stream| stream.recv_state);
                let taken = match goes_on {
                    Some(RecvState::Head) => self
                        .recv_response(key, end_stream, fields)
                        .map_err(|why| (Reason::PROTOCOL_ERROR, why)),
                    Some(RecvState::Body) => self
                        .recv_trailers(key, end_stream, fields)
                        .map_err(|why| (Reason::PROTOCOL_ERROR, why)),
                    Some(RecvState::Closed) => {
                        Err((Reason::STREAM_CLOSED, "frame after END_STREAM"))
                    }
                    None => Ok(()),
                };
                if let Err((reason, why)) = taken {
                    self.send_reset(key, reason, Error::Malformed(why));
                }
                Ok(())
            }
            None if begins => {
                self.recv_request(id, end_stream, fields);
                Ok(())
            }
            None => self.recv_on_closed(id, frame::HEADERS),
        }
    }

    /// Receives trailers.
    fn recv_trailers(
        &mut self,
        key: Key,
        end_stream: bool,
        fields: Fields,
    ) -> Result<(), &'static str> {
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let trailers = fields.into_trailers()?;
        if !end_stream {
            return Err("trailers without END_STREAM");
        }
        if !stream.matches_content_length(0, true) {
            return Err("body length differs from content-length");
        }
        stream.trailers = Some(trailers);
        stream.recv_state = RecvState::Closed;
        stream.wake_recv();
        self.release_if_closed(key);
        Ok(())
    }

    fn recv_settings(&mut self, payload: &[u8]) -> Result<(), Violation> {
        let (settings, rest) = payload.as_chunks::<6>();
        if !rest.is_empty() {
            return Err(Violation(
                Reason::FRAME_SIZE_ERROR,
                "SETTINGS length is not a multiple of 6",
            ));
        }
        for &[a, b, w, x, y, z] in settings {
            let value = u32::from_be_bytes([w, x, y, z]);
            match u16::from_be_bytes([a, b]) {
                1 => self.encoder.set_max_size(value as usize),
                2 if value > 1 => {
                    return protocol_error("ENABLE_PUSH is neither 0 nor 1");
                }
                3 if !self.is_server() => self.max_open = value as usize,
                4 => self.set_initial_send_window(value)?,
                // This side sends no larger frames, whatever the peer allows.
                5 if !(1 << 14..1 << 24).contains(&value) => {
                    return protocol_error("MAX_FRAME_SIZE is out of range");
                }
                _ => {}
            }
        }
        frame::put(&mut self.out, frame::SETTINGS, frame::ACK, 0, &[]);
        Ok(())
    }

    /// Receives a GOAWAY.
    fn recv_go_away(&mut self, last: u32, reason: Reason) {
        match self.role {
            Role::Client => self.recv_server_go_away(last, reason),
            // The client opens no more streams.
            Role::Server(_) => {
                self.closing.get_or_insert(Error::GoAway(reason));
            }
        }
    }

    /// Releases capacity of the connection's window. WINDOW_UPDATE is sent for many bytes at once.
    pub(super) fn release_connection_capacity(&mut self, length: usize) {
        /// Half of the window.
        const MIN_CONNECTION_UPDATE_BYTES: u32 = 1 << 30;
        self.unclaimed += length as u32;
        if self.unclaimed >= MIN_CONNECTION_UPDATE_BYTES {
            let unclaimed = std::mem::take(&mut self.unclaimed);
            self.recv_window += unclaimed;
            frame::put(&mut self.out, frame::WINDOW_UPDATE, 0, 0, &unclaimed.to_be_bytes());
            self.wake();
        }
    }
}
