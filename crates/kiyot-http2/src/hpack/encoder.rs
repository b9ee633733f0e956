//! Writes header blocks: what comes again and again is a byte, whatever it was the first time.

use std::collections::VecDeque;

use super::{
    MAX_TABLE_BYTES, integer,
    table::{STATIC_LEN, static_field, static_name},
};

/// Longer fields are not kept: they would push many others out. Bytes.
const MAX_INDEXED_FIELD_BYTES: usize = 512;

/// A field that the other side knows.
#[derive(Debug)]
struct Entry {
    text: Box<[u8]>,
    name_length: usize,
}

/// Writes all header blocks of one side of a connection, in their order.
#[derive(Debug)]
pub(crate) struct Encoder {
    /// Newest first.
    entries: VecDeque<Entry>,
    size: usize,
    max_size: usize,
    /// The least room since the other side was told last; `None` if it knows.
    pending_update: Option<usize>,
}

impl Entry {
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
    pub(crate) fn new() -> Self {
        Self { entries: VecDeque::new(), size: 0, max_size: MAX_TABLE_BYTES, pending_update: None }
    }

    /// The other side keeps no more than this. Bytes as HPACK counts them.
    pub(crate) fn set_max_size(&mut self, max_size: usize) {
        let max_size = max_size.min(MAX_TABLE_BYTES);
        if max_size != self.max_size {
            self.pending_update = Some(self.pending_update.unwrap_or(self.max_size).min(max_size));
            self.max_size = max_size;
            self.shrink(0);
        }
    }

    /// To be called once at the beginning of each block.
    pub(crate) fn begin_block(&mut self, out: &mut Vec<u8>) {
        if let Some(least) = self.pending_update.take() {
            if least < self.max_size {
                integer::encode(out, 0x20, 5, least);
            }
            integer::encode(out, 0x20, 5, self.max_size);
        }
    }

    /// Writes a field. What `varies` from block to block is not kept, and what is `secret` must not
    /// be, by nobody on the way.
    pub(crate) fn put(
        &mut self,
        out: &mut Vec<u8>,
        name: &[u8],
        value: &[u8],
        varies: bool,
        secret: bool,
    ) {
        if !secret && let Some(at) = self.entries.iter().position(|kept| kept.is(name, value)) {
            return integer::encode(out, 0x80, 7, STATIC_LEN + 1 + at);
        }
        if !secret && let Some(index) = static_field(name, value) {
            return integer::encode(out, 0x80, 7, index);
        }
        let text = name.len() + value.len();
        let index = match static_name(name) {
            0 => self
                .entries
                .iter()
                .position(|kept| &kept.text[..kept.name_length] == name)
                .map_or(0, |at| STATIC_LEN + 1 + at),
            index => index,
        };
        // What varies is kept once, for its name.
        let keeps = !secret && text <= MAX_INDEXED_FIELD_BYTES && (!varies || index == 0);
        match (keeps, secret) {
            (true, _) => integer::encode(out, 0x40, 6, index),
            (_, true) => integer::encode(out, 0x10, 4, index),
            _ => integer::encode(out, 0, 4, index),
        }
        if index == 0 {
            put_string(out, name);
        }
        put_string(out, value);
        if keeps {
            self.shrink(text + 32);
            if text + 32 <= self.max_size {
                self.size += text + 32;
                self.entries.push_front(Entry {
                    text: [name, value].concat().into(),
                    name_length: name.len(),
                });
            }
        }
    }

    fn shrink(&mut self, coming: usize) {
        while self.size + coming > self.max_size
            && let Some(oldest) = self.entries.pop_back()
        {
            self.size -= oldest.size();
        }
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    integer::encode(out, 0, 7, string.len());
    out.extend_from_slice(string);
}
