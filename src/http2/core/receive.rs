//! What the peer's frames do.

use super::{Core, Role, fields::Fields};
use crate::http2::{
    MAX_HEADER_LIST, Reason,
    error::{Error, Violation},
    frame::{self, HEAD, Head, MAX_31, MAX_PAYLOAD},
    stream::Coming,
    streams::Key,
};

/// In how many frames a header block may come. Those of the longest need not be fuller than half.
const MAX_PARTS: usize = 2 * MAX_HEADER_LIST as usize / MAX_PAYLOAD;

/// A header block that comes in parts.
#[derive(Debug)]
pub(super) struct Block {
    stream: u32,
    ends: bool,
    bytes: Vec<u8>,
    parts: usize,
}

fn protocol<T>(what: &'static str) -> Result<T, Violation> {
    Err(Violation(Reason::PROTOCOL_ERROR, what))
}

fn length(head: Head, is: usize) -> Result<(), Violation> {
    if head.length == is {
        Ok(())
    } else {
        Err(Violation(Reason::FRAME_SIZE_ERROR, "a frame has another length than its kind has"))
    }
}

impl Core {
    /// Takes the frames that came whole; says how many bytes they were. After an error the
    /// connection is no more.
    pub(in super::super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Violation> {
        let mut rest = bytes;
        if !self.take_preface(&mut rest)? {
            return Ok(0);
        }
        while let Some(head) = Head::read(rest) {
            if head.length > MAX_PAYLOAD {
                return Err(Violation(Reason::FRAME_SIZE_ERROR, "a frame is too long"));
            }
            let Some((payload, behind)) = rest[HEAD..].split_at_checked(head.length) else { break };
            self.receive(head, payload)?;
            self.frames += 1;
            rest = behind;
        }
        Ok(bytes.len() - rest.len())
    }

    /// Takes a frame. After an error the connection is no more.
    pub(in super::super) fn receive(
        &mut self,
        head: Head,
        payload: &[u8],
    ) -> Result<(), Violation> {
        if let Some(block) = &mut self.block {
            if head.kind != frame::CONTINUATION || head.stream != block.stream {
                return protocol("a header block is interrupted");
            }
            block.parts += 1;
            if block.bytes.len() + payload.len() > MAX_HEADER_LIST as usize
                || block.parts > MAX_PARTS
            {
                return Err(Violation(Reason::ENHANCE_YOUR_CALM, "a header block is too long"));
            }
            block.bytes.extend_from_slice(payload);
            if head.has(frame::END_HEADERS)
                && let Some(block) = self.block.take()
            {
                return self.headers(block.stream, block.ends, &block.bytes);
            }
            return Ok(());
        }
        if !self.greeted {
            if head.kind != frame::SETTINGS || head.has(frame::ACK) {
                return protocol("it does not begin with SETTINGS");
            }
            self.greeted = true;
        }
        if matches!(head.kind, frame::SETTINGS | frame::PING | frame::GOAWAY) && head.stream != 0 {
            return protocol("a frame of the connection has a stream");
        }
        if matches!(head.kind, frame::DATA | frame::HEADERS | frame::RST_STREAM)
            && self.is_idle(head.stream)
            && !(head.kind == frame::HEADERS && self.may_be_opened(head.stream))
        {
            return protocol("a frame is of a stream that was not opened");
        }
        match head.kind {
            frame::DATA => self.data(head, frame::unpadded(head, payload)?),
            frame::HEADERS => {
                let bytes = frame::unpadded(head, payload)?;
                let ends = head.has(frame::END_STREAM);
                if head.has(frame::END_HEADERS) {
                    return self.headers(head.stream, ends, bytes);
                }
                self.block =
                    Some(Block { stream: head.stream, ends, bytes: bytes.to_vec(), parts: 1 });
                Ok(())
            }
            frame::RST_STREAM => {
                length(head, 4)?;
                if let Some(key) = self.streams.of_id(head.stream) {
                    if let Some(stream) = self.streams.get(key) {
                        stream.end(Error::Reset(frame::number(payload).into()));
                    }
                    self.settle(key);
                }
                Ok(())
            }
            frame::SETTINGS if head.has(frame::ACK) => length(head, 0),
            frame::SETTINGS => self.settings(payload),
            frame::PUSH_PROMISE => protocol("it promises what it was told not to push"),
            frame::PING => {
                length(head, 8)?;
                if head.has(frame::ACK) {
                    self.ponged(payload);
                } else {
                    frame::put(&mut self.out, frame::PING, frame::ACK, 0, payload);
                }
                Ok(())
            }
            frame::GOAWAY if head.length < 8 => length(head, 8),
            frame::GOAWAY => {
                self.goes_away(
                    frame::number(payload) & MAX_31,
                    frame::number(&payload[4..]).into(),
                );
                Ok(())
            }
            frame::WINDOW_UPDATE => {
                length(head, 4)?;
                self.window_update(head.stream, frame::number(payload) & MAX_31)
            }
            frame::CONTINUATION => protocol("a header block goes on that had not begun"),
            // What it says has no meaning any more (RFC 9113, 5.3.2).
            frame::PRIORITY if head.stream == 0 => protocol("a frame of a stream has none"),
            frame::PRIORITY if frame::number(payload) & MAX_31 == head.stream => {
                protocol("a stream waits for itself")
            }
            frame::PRIORITY => length(head, 5),
            // What HTTP/2 may have one day.
            _ => Ok(()),
        }
    }

    fn data(&mut self, head: Head, data: &[u8]) -> Result<(), Violation> {
        let overrun = Violation(Reason::FLOW_CONTROL_ERROR, "it sent more than the window allows");
        let length = head.length as u32;
        self.recv_window = self.recv_window.checked_sub(length).ok_or(overrun)?;
        // What nobody wants any more is under way for a while. Padding is for nobody.
        let Some(key) = self.streams.of_id(head.stream) else {
            self.was_taken(head.length);
            return self.after_the_end(head.stream, head.kind);
        };
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let ends = head.has(frame::END_STREAM);
        let keeps_promise = stream.keeps_promise(data.len(), ends);
        let wrong = match stream.coming {
            Coming::Body if keeps_promise => None,
            Coming::Body => Some((Reason::PROTOCOL_ERROR, "its content-length is not its length")),
            Coming::Head => Some((Reason::PROTOCOL_ERROR, "it has data before its head")),
            Coming::Nothing => Some((Reason::STREAM_CLOSED, "it goes on behind its end")),
        };
        if let Some((reason, why)) = wrong {
            self.was_taken(head.length);
            self.reset(key, reason, Error::Malformed(why));
            return Ok(());
        }
        stream.recv_window = stream.recv_window.checked_sub(length).ok_or(overrun)?;
        let kept = if stream.is_wanted { data } else { &[] };
        stream.taken += (head.length - kept.len()) as u32;
        // A frame without data says nothing, unless it is the last.
        stream.body.extend_from_slice(kept);
        if ends {
            stream.coming = Coming::Nothing;
        }
        if ends || !kept.is_empty() {
            stream.wake_receiver();
        }
        let padding = head.length - kept.len();
        self.was_taken(padding);
        if ends {
            self.settle(key);
        } else if padding > 0 {
            self.tell_taken(key);
        }
        Ok(())
    }

    fn headers(&mut self, id: u32, ends: bool, block: &[u8]) -> Result<(), Violation> {
        let key = self.streams.of_id(id);
        let begins = self.may_be_opened(id);
        let mut fields = Fields::default();
        // Its table is to be followed whoever wants the fields.
        self.decoder.read(block, |field| {
            if key.is_some() || begins {
                fields.add(field);
            }
        })?;
        match key {
            Some(key) => {
                let goes_on = self.streams.get(key).map(|stream| stream.coming);
                let taken = match goes_on {
                    Some(Coming::Head) => self
                        .answered(key, ends, fields)
                        .map_err(|why| (Reason::PROTOCOL_ERROR, why)),
                    Some(Coming::Body) => {
                        self.trailed(key, ends, fields).map_err(|why| (Reason::PROTOCOL_ERROR, why))
                    }
                    Some(Coming::Nothing) => {
                        Err((Reason::STREAM_CLOSED, "it goes on behind its end"))
                    }
                    None => Ok(()),
                };
                if let Err((reason, why)) = taken {
                    self.reset(key, reason, Error::Malformed(why));
                }
                Ok(())
            }
            None if begins => {
                self.asked(id, ends, fields);
                Ok(())
            }
            None => self.after_the_end(id, frame::HEADERS),
        }
    }

    /// Takes the trailers of a body.
    fn trailed(&mut self, key: Key, ends: bool, fields: Fields) -> Result<(), &'static str> {
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let trailers = fields.trailers()?;
        if !ends {
            return Err("it goes on behind its trailers");
        }
        if !stream.keeps_promise(0, true) {
            return Err("its content-length is not its length");
        }
        stream.trailers = Some(trailers);
        stream.coming = Coming::Nothing;
        stream.wake_receiver();
        self.settle(key);
        Ok(())
    }

    fn settings(&mut self, payload: &[u8]) -> Result<(), Violation> {
        let (settings, rest) = payload.as_chunks::<6>();
        if !rest.is_empty() {
            return Err(Violation(Reason::FRAME_SIZE_ERROR, "a frame SETTINGS has half a setting"));
        }
        for &[a, b, w, x, y, z] in settings {
            let value = u32::from_be_bytes([w, x, y, z]);
            match u16::from_be_bytes([a, b]) {
                1 => self.encoder.set_room(value as usize),
                2 if value > 1 => {
                    return protocol("it sets whether it takes pushes to neither yes nor no");
                }
                3 if !self.is_server() => self.max_open = value as usize,
                4 => self.set_first_send_window(value)?,
                // We need no longer ones.
                5 if !(1 << 14..1 << 24).contains(&value) => {
                    return protocol("it takes frames of a length that may not be");
                }
                _ => {}
            }
        }
        frame::put(&mut self.out, frame::SETTINGS, frame::ACK, 0, &[]);
        Ok(())
    }

    /// The peer goes away.
    fn goes_away(&mut self, last: u32, reason: Reason) {
        match self.role {
            Role::Client => self.server_goes_away(last, reason),
            // It has asked all that it asks.
            Role::Server(_) => {
                self.leaving.get_or_insert(Error::GoneAway(reason));
            }
        }
    }

    /// Bytes have left the connection's window for good; the peer is told of many at once.
    pub(super) fn was_taken(&mut self, length: usize) {
        /// Half of the window.
        const TOLD: u32 = 1 << 30;
        self.taken += length as u32;
        if self.taken >= TOLD {
            let taken = std::mem::take(&mut self.taken);
            self.recv_window += taken;
            frame::put(&mut self.out, frame::WINDOW_UPDATE, 0, 0, &taken.to_be_bytes());
            self.stir();
        }
    }
}
