//! Encodes header blocks. A repeated field takes one byte.

use std::collections::VecDeque;

use super::{
    MAX_TABLE_BYTES, integer,
    table::{STATIC_LEN, static_field, static_name},
};

/// Size at which a field is no longer indexed: it would evict many others.
const MAX_INDEXED_FIELD_BYTES: usize = 512;

/// Entry of the dynamic table.
#[derive(Debug)]
struct TableEntry {
    text: Box<[u8]>,
    name_length: usize,
}

/// Encoder of a connection's header blocks, in order.
#[derive(Debug)]
pub(crate) struct Encoder {
    /// Entries, newest first.
    entries: VecDeque<TableEntry>,
    size: usize,
    max_size: usize,
    /// Smallest table size since the last block, which the next one announces.
    pending_update: Option<usize>,
}

impl TableEntry {
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

    /// Sets the peer's limit of the table size.
    pub(crate) fn set_max_size(&mut self, max_size: usize) {
        let max_size = max_size.min(MAX_TABLE_BYTES);
        if max_size != self.max_size {
            self.pending_update = Some(self.pending_update.unwrap_or(self.max_size).min(max_size));
            self.max_size = max_size;
            self.shrink(0);
        }
    }

    /// Announces a change of the table size. Called at the beginning of each block.
    pub(crate) fn begin_block(&mut self, out: &mut Vec<u8>) {
        if let Some(least) = self.pending_update.take() {
            if least < self.max_size {
                integer::encode(out, 0x20, 5, least);
            }
            integer::encode(out, 0x20, 5, self.max_size);
        }
    }

    /// Encodes a field. A value that `varies` is not indexed, and a `secret` value is marked as
    /// never indexed.
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
        // A value that varies is indexed once, for its name.
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
                self.entries.push_front(TableEntry {
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
