//! What the peer's frames do.

use h2::Reason;
use http::{HeaderMap, Response, StatusCode};

use super::Core;
use crate::backends::cri::{
    MAX_HEADER_LIST,
    http2::{
        error::{Error, Violation},
        frame::{self, Head, MAX_31},
        hpack::{Field, Name, Pseudo},
        stream::Coming,
        streams::Key,
    },
};

/// A header block that comes in parts.
#[derive(Debug)]
pub(super) struct Block {
    stream: u32,
    ends: bool,
    bytes: Vec<u8>,
}

/// What a header block has.
#[derive(Debug, Default)]
struct Fields {
    status: Option<StatusCode>,
    map: HeaderMap,
    size: usize,
    wrong: Option<&'static str>,
}

impl Fields {
    fn add(&mut self, field: &Field) {
        self.size += field.size();
        if self.size > MAX_HEADER_LIST as usize {
            self.wrong = Some("its metadata is too long");
        } else if !field.is_fine {
            self.wrong = Some("it has metadata that HTTP/2 does not allow");
        } else if let Name::Header(name) = &field.name {
            if self.map.try_append(name.clone(), field.value.clone()).is_err() {
                self.wrong = Some("it has too much metadata");
            }
        } else if field.name == Name::Pseudo(Pseudo::Status) && self.status.is_none() && self.map.is_empty() {
            self.status = StatusCode::from_bytes(field.value.as_bytes()).ok();
            if self.status.is_none() {
                self.wrong = Some("its status is no number of three digits");
            }
        } else {
            self.wrong = Some("it has fields that are no answer's");
        }
    }
}

fn protocol<T>(what: &'static str) -> Result<T, Violation> {
    Err(Violation(Reason::PROTOCOL_ERROR, what))
}

fn length(head: Head, is: usize) -> Result<(), Violation> {
    if head.length == is { Ok(()) } else { Err(Violation(Reason::FRAME_SIZE_ERROR, "a frame has another length than its kind has")) }
}

impl Core {
    /// Takes a frame. After an error the connection is no more.
    pub(in super::super) fn receive(&mut self, head: Head, payload: &[u8]) -> Result<(), Violation> {
        if let Some(block) = &mut self.block {
            if head.kind != frame::CONTINUATION || head.stream != block.stream {
                return protocol("a header block is interrupted");
            }
            if block.bytes.len() + payload.len() > MAX_HEADER_LIST as usize {
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
        if matches!(head.kind, frame::DATA | frame::HEADERS | frame::RST_STREAM) && self.is_idle(head.stream) {
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
                self.block = Some(Block { stream: head.stream, ends, bytes: bytes.to_vec() });
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
                if !head.has(frame::ACK) {
                    frame::put(&mut self.out, frame::PING, frame::ACK, 0, payload);
                }
                Ok(())
            }
            frame::GOAWAY if head.length < 8 => length(head, 8),
            frame::GOAWAY => {
                self.goes_away(frame::number(payload) & MAX_31, frame::number(&payload[4..]).into());
                Ok(())
            }
            frame::WINDOW_UPDATE => {
                length(head, 4)?;
                self.window_update(head.stream, frame::number(payload) & MAX_31)
            }
            frame::CONTINUATION => protocol("a header block goes on that had not begun"),
            // PRIORITY, and what HTTP/2 may have one day.
            _ => Ok(()),
        }
    }

    /// Whether a stream was never opened. The peer opens none.
    pub(super) fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id >= self.next_id
    }

    fn data(&mut self, head: Head, data: &[u8]) -> Result<(), Violation> {
        let overrun = Violation(Reason::FLOW_CONTROL_ERROR, "it sent more than the window allows");
        let length = head.length as u32;
        self.recv_window = self.recv_window.checked_sub(length).ok_or(overrun)?;
        // What nobody wants any more is under way for a while. Padding is for nobody.
        let Some(key) = self.streams.of_id(head.stream) else {
            self.was_taken(head.length);
            return Ok(());
        };
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        let wrong = match stream.coming {
            Coming::Body => None,
            Coming::Head => Some((Reason::PROTOCOL_ERROR, "it has data before its head")),
            Coming::Nothing => Some((Reason::STREAM_CLOSED, "it goes on behind its end")),
        };
        if let Some((reason, why)) = wrong {
            self.was_taken(head.length);
            self.reset(key, reason, Error::Malformed(why));
            return Ok(());
        }
        stream.recv_window = stream.recv_window.checked_sub(length).ok_or(overrun)?;
        stream.taken += (head.length - data.len()) as u32;
        stream.body.extend_from_slice(data);
        let ends = head.has(frame::END_STREAM);
        if ends {
            stream.coming = Coming::Nothing;
        }
        if ends || !data.is_empty() {
            stream.wake_receiver();
        }
        self.was_taken(head.length - data.len());
        if ends {
            self.settle(key);
        }
        Ok(())
    }

    fn headers(&mut self, id: u32, ends: bool, block: &[u8]) -> Result<(), Violation> {
        let key = self.streams.of_id(id);
        let mut fields = Fields::default();
        // Its table is to be followed whoever wants the fields.
        self.decoder.read(block, |field| {
            if key.is_some() {
                fields.add(field);
            }
        })?;
        if let Some(key) = key
            && let Err(why) = self.answer(key, ends, fields)
        {
            self.reset(key, Reason::PROTOCOL_ERROR, Error::Malformed(why));
        }
        Ok(())
    }

    /// Takes the head of an answer, or its trailers.
    fn answer(&mut self, key: Key, ends: bool, fields: Fields) -> Result<(), &'static str> {
        let Some(stream) = self.streams.get(key) else { return Ok(()) };
        if let Some(wrong) = fields.wrong {
            return Err(wrong);
        }
        match (stream.coming, fields.status) {
            (Coming::Head, None) => return Err("it has no status"),
            (Coming::Head, Some(status)) if status.is_informational() => return if ends { Err("it ends before it begins") } else { Ok(()) },
            (Coming::Head, Some(status)) => {
                let mut head = Response::new(());
                *head.status_mut() = status;
                *head.headers_mut() = fields.map;
                *head.version_mut() = http::Version::HTTP_2;
                stream.head = Some(head);
                stream.coming = Coming::Body;
            }
            (Coming::Body, Some(_)) => return Err("it begins twice"),
            (Coming::Body, None) if !ends => return Err("it goes on behind its trailers"),
            (Coming::Body, None) => stream.trailers = Some(fields.map),
            (Coming::Nothing, _) => return Err("it goes on behind its end"),
        }
        if ends {
            stream.coming = Coming::Nothing;
        }
        stream.wake_receiver();
        if ends {
            self.settle(key);
        }
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
                2 if value > 1 => return protocol("it sets whether it takes pushes to neither yes nor no"),
                3 => self.max_open = value as usize,
                4 => self.set_first_send_window(value)?,
                // We need no longer ones.
                5 if !(1 << 14..1 << 24).contains(&value) => return protocol("it takes frames of a length that may not be"),
                _ => {}
            }
        }
        frame::put(&mut self.out, frame::SETTINGS, frame::ACK, 0, &[]);
        Ok(())
    }

    /// The peer takes no new calls, and does nothing with those from `last` on.
    fn goes_away(&mut self, last: u32, reason: Reason) {
        let error = Error::GoneAway(reason);
        self.leaving.get_or_insert(error.clone());
        let all = self.streams.iter().filter(|(_, stream)| stream.id == 0 || stream.id > last);
        let not_begun: Vec<Key> = all.filter(|(_, stream)| !stream.is_over()).map(|(key, _)| key).collect();
        for key in not_begun {
            if let Some(stream) = self.streams.get(key) {
                stream.end(error.clone());
            }
            self.settle(key);
        }
        self.waiting.clear();
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
