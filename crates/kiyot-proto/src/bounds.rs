//! The memory that a message needs once it is decoded, counted before it is decoded.
//!
//! Two bytes on the wire may be a struct of hundreds of bytes: a message of the largest allowed
//! length would need hundreds of times its length. So its fields are walked first, without
//! allocating anything, and a message that would need more than its type may is refused.

mod limits;
mod wire;

use self::wire::{Reader, Value, WireError};

/// The places that a growing list may hold for each of its entries. A first entry gets four
/// (`RawVec`, `hashbrown`), a list that doubles holds its old and its new places, three for each
/// entry at most, and an allocator rounds up by a quarter at most.
const SLOTS_PER_ENTRY: usize = 5;
/// The bytes of a string, or of `Bytes`, without its content.
const STRING_BYTES: usize = 32;
/// The bytes of one entry of a map of strings, with what the table itself needs.
const MAP_ENTRY_BYTES: usize = 64;
/// The bytes of a number.
const NUMBER_BYTES: usize = size_of::<u64>();

/// The bytes of the longest message on the control connection, in either direction.
pub const MAX_CONTROL_FRAME_BYTES: usize = limits::MAX_CONTROL_FRAME_BYTES;

/// The bytes of the longest answer of a cell to a call, other than `ExecSync`.
pub const MAX_RESPONSE_BYTES: usize = limits::MAX_RESPONSE_BYTES;

/// The bytes of the longest answer of a cell to `ExecSync`: as much as a kubelet takes.
pub const MAX_EXEC_RESPONSE_BYTES: usize = limits::MAX_EXEC_RESPONSE_BYTES;

/// A message whose memory is counted before it is decoded.
pub trait Bounded: prost::Message {
    /// Its fields, and its limits.
    const SHAPE: Shape;
}

/// The fields of a message that need memory of their own, and its limits.
#[derive(Debug)]
pub struct Shape {
    /// The message's name in `proto/`.
    pub name: &'static str,
    /// The bytes of its struct.
    pub size: usize,
    /// Its encoded bytes at most, wherever it is.
    pub encoded: usize,
    /// The bytes that it may need when it is decoded, if it is no part of another one.
    pub decoded: usize,
    /// Its fields, by their numbers.
    pub fields: &'static [(u32, Field)],
}

/// How a field takes memory.
#[derive(Debug)]
pub enum Field {
    /// A string, or bytes.
    Text,
    /// A list of them.
    Texts,
    /// A list of numbers of variable width, packed or not.
    Numbers,
    /// A map of strings.
    Map,
    /// A message, which is in the struct of the one that has it.
    Message(&'static Shape),
    /// A list of messages.
    Messages(&'static Shape),
}

/// The reason for which a message is not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BoundsError {
    /// The message, or a message in it, is too long.
    #[error("a message {name} of {length} bytes, where {limit} are allowed")]
    Length {
        /// The message's name in `proto/`.
        name: &'static str,
        /// Its encoded bytes.
        length: usize,
        /// The most that is allowed, in bytes.
        limit: usize,
    },
    /// The message has too many entries.
    #[error("a message {name} that needs more than {limit} bytes when it is decoded")]
    Memory {
        /// The message's name in `proto/`.
        name: &'static str,
        /// So many bytes are allowed.
        limit: usize,
    },
    /// A field has another wire type than its own, or is a group.
    #[error("a message {name} with a field of another wire type than its own")]
    WireType {
        /// The message's name in `proto/`.
        name: &'static str,
    },
    /// The bytes are no protobuf message.
    #[error("a message {name} that can't be read")]
    Malformed {
        /// The message's name in `proto/`.
        name: &'static str,
    },
}

impl Shape {
    /// The shape of a message by its name, its struct's size and its fields.
    pub(crate) const fn new(
        name: &'static str,
        size: usize,
        fields: &'static [(u32, Field)],
    ) -> Self {
        let (encoded, decoded) = limits::for_message(name);
        Self { name, size, encoded, decoded, fields }
    }

    /// Checks that a message may be decoded. Returns the bytes that it may need then.
    pub fn check(&self, message: &[u8]) -> Result<usize, BoundsError> {
        let mut weight = MemoryCounter { bytes: self.size, limit: self.decoded };
        match weight.add_message(self, message) {
            Ok(()) => Ok(weight.bytes),
            Err(BoundsError::Memory { limit, .. }) => {
                Err(BoundsError::Memory { name: self.name, limit })
            }
            Err(refused) => Err(refused),
        }
    }

    fn field(&self, number: u32) -> Option<&'static Field> {
        self.fields.iter().find(|(of, _)| *of == number).map(|(_, field)| field)
    }
}

/// Decodes a message that needs no more memory than its type may.
pub fn decode<M: Bounded + Default>(message: bytes::Bytes) -> Result<M, BoundsError> {
    M::SHAPE.check(&message)?;
    M::decode(message).map_err(|_| BoundsError::Malformed { name: M::SHAPE.name })
}

/// The bytes that were counted so far.
struct MemoryCounter {
    bytes: usize,
    limit: usize,
}

impl MemoryCounter {
    /// Counts all that is beyond the struct of a message. No type contains itself, so the depth is
    /// bounded by the types.
    fn add_message(&mut self, shape: &Shape, message: &[u8]) -> Result<(), BoundsError> {
        if message.len() > shape.encoded {
            return Err(BoundsError::Length {
                name: shape.name,
                length: message.len(),
                limit: shape.encoded,
            });
        }
        let mut reader = Reader::new(message);
        while let Some((number, value)) = reader.next().map_err(|broken| match broken {
            WireError::Malformed => BoundsError::Malformed { name: shape.name },
            WireError::WireType => BoundsError::WireType { name: shape.name },
        })? {
            let Some(field) = shape.field(number) else { continue };
            match (field, value) {
                (Field::Text, Value::Bytes(text)) => self.add_text(shape, text)?,
                (Field::Texts, Value::Bytes(text)) => {
                    self.add(shape, STRING_BYTES * SLOTS_PER_ENTRY)?;
                    self.add_text(shape, text)?;
                }
                (Field::Numbers, Value::Bytes(packed)) => {
                    // The last byte of each number, and no other, has no high bit.
                    let numbers = packed.iter().filter(|byte| **byte & 0x80 == 0).count();
                    self.add(shape, numbers.saturating_mul(NUMBER_BYTES * SLOTS_PER_ENTRY))?;
                }
                (Field::Numbers, Value::Number) => {
                    self.add(shape, NUMBER_BYTES * SLOTS_PER_ENTRY)?
                }
                (Field::Map, Value::Bytes(entry)) => {
                    self.add(shape, MAP_ENTRY_BYTES * SLOTS_PER_ENTRY)?;
                    self.add_text(shape, entry)?;
                }
                (Field::Message(part), Value::Bytes(message)) => self.add_message(part, message)?,
                (Field::Messages(part), Value::Bytes(message)) => {
                    self.add(shape, part.size.saturating_mul(SLOTS_PER_ENTRY))?;
                    self.add_message(part, message)?;
                }
                // prost would take the number before an entry of a map for its length, whatever its
                // wire type.
                (
                    Field::Text
                    | Field::Texts
                    | Field::Map
                    | Field::Message(_)
                    | Field::Messages(_),
                    Value::Number,
                ) => return Err(BoundsError::WireType { name: shape.name }),
            }
        }
        Ok(())
    }

    fn add_text(&mut self, shape: &Shape, text: &[u8]) -> Result<(), BoundsError> {
        let rounded = text.len() + text.len() / 4;
        self.add(shape, if text.is_empty() { 0 } else { rounded + NUMBER_BYTES })
    }

    fn add(&mut self, shape: &Shape, bytes: usize) -> Result<(), BoundsError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limit {
            return Err(BoundsError::Memory { name: shape.name, limit: self.limit });
        }
        Ok(())
    }
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

#[cfg(test)]
mod tests;
