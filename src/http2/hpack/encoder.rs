//! Writes header blocks: what comes again and again is a byte, whatever it was the first time.

use std::collections::VecDeque;

use super::{
    TABLE, integer,
    table::{KNOWN_LENGTH, known_field, known_name},
};

/// Longer fields are not kept: they would push many others out. Bytes.
const LONG: usize = 512;

/// A field that the other side knows.
#[derive(Debug)]
struct Kept {
    text: Box<[u8]>,
    name_length: usize,
}

/// Writes all header blocks of one side of a connection, in their order.
#[derive(Debug)]
pub(in super::super) struct Encoder {
    /// Newest first.
    kept: VecDeque<Kept>,
    size: usize,
    room: usize,
    /// The least room since the other side was told last; `None` if it knows.
    to_tell: Option<usize>,
}

impl Kept {
    fn size(&self) -> usize {
        self.text.len() + 32
    }

    fn is(&self, name: &[u8], value: &[u8]) -> bool {
        self.name_length == name.len()
            && self.text.len() == name.len() + value.len()
            && self.text.ends_with(value)
            && self.text.starts_with(name)
    }
}

impl Encoder {
    pub(in super::super) fn new() -> Self {
        Self { kept: VecDeque::new(), size: 0, room: TABLE, to_tell: None }
    }

    /// The other side keeps no more than this. Bytes as HPACK counts them.
    pub(in super::super) fn set_room(&mut self, room: usize) {
        let room = room.min(TABLE);
        if room != self.room {
            self.to_tell = Some(self.to_tell.unwrap_or(self.room).min(room));
            self.room = room;
            self.shrink(0);
        }
    }

    /// To be called once at the beginning of each block.
    pub(in super::super) fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some(least) = self.to_tell.take() {
            if least < self.room {
                integer::put(out, 0x20, 5, least);
            }
            integer::put(out, 0x20, 5, self.room);
        }
    }

    /// Writes a field. What `varies` from block to block is not kept, and what is `secret` must not
    /// be, by nobody on the way.
    pub(in super::super) fn put(
        &mut self,
        out: &mut Vec<u8>,
        name: &[u8],
        value: &[u8],
        varies: bool,
        secret: bool,
    ) {
        if !secret && let Some(at) = self.kept.iter().position(|kept| kept.is(name, value)) {
            return integer::put(out, 0x80, 7, KNOWN_LENGTH + 1 + at);
        }
        if !secret && let Some(place) = known_field(name, value) {
            return integer::put(out, 0x80, 7, place);
        }
        let text = name.len() + value.len();
        let place = match known_name(name) {
            0 => self
                .kept
                .iter()
                .position(|kept| &kept.text[..kept.name_length] == name)
                .map_or(0, |at| KNOWN_LENGTH + 1 + at),
            place => place,
        };
        // What varies is kept once, for its name.
        let keeps = !secret && text <= LONG && (!varies || place == 0);
        match (keeps, secret) {
            (true, _) => integer::put(out, 0x40, 6, place),
            (_, true) => integer::put(out, 0x10, 4, place),
            _ => integer::put(out, 0, 4, place),
        }
        if place == 0 {
            put_string(out, name);
        }
        put_string(out, value);
        if keeps {
            self.shrink(text + 32);
            if text + 32 <= self.room {
                self.size += text + 32;
                self.kept.push_front(Kept {
                    text: [name, value].concat().into(),
                    name_length: name.len(),
                });
            }
        }
    }

    fn shrink(&mut self, coming: usize) {
        while self.size + coming > self.room
            && let Some(oldest) = self.kept.pop_back()
        {
            self.size -= oldest.size();
        }
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    integer::put(out, 0, 7, string.len());
    out.extend_from_slice(string);
}
