//! Limits on the memory of decoded messages, checked before a message is decoded.
//!
//! Two bytes on the wire may decode to a struct of hundreds of bytes, so a length limit alone would
//! allow hundreds of times this memory. The fields of a message are counted first, without
//! allocation. A message that would need more memory than its type allows is refused.

mod limits;
mod wire;

use self::wire::{Reader, Value, WireError};

/// The most slots that a growing list may allocate per entry. The first entry gets four slots
/// (`RawVec`, `hashbrown`). A list that doubles holds its old and its new slots, up to three per
/// entry. An allocator rounds up by at most a quarter.
const SLOTS_PER_ENTRY: usize = 5;
/// The bytes of a `String` or `Bytes` without its content.
const STRING_BYTES: usize = 32;
/// The bytes of an entry of a map of strings, with the table's overhead.
const MAP_ENTRY_BYTES: usize = 64;
/// The bytes of a number.
const NUMBER_BYTES: usize = size_of::<u64>();

/// The bytes of the longest message on the control connection, in either direction.
pub const MAX_CONTROL_FRAME_BYTES: usize = limits::MAX_CONTROL_FRAME_BYTES;

/// The bytes of the longest response of a cell to a call other than `ExecSync`.
pub const MAX_RESPONSE_BYTES: usize = limits::MAX_RESPONSE_BYTES;

/// The bytes of the longest response of a cell to `ExecSync`: the limit of a kubelet.
pub const MAX_EXEC_RESPONSE_BYTES: usize = limits::MAX_EXEC_RESPONSE_BYTES;

/// A message with limits for decoding.
pub trait Bounded: prost::Message {
    /// The message's fields and limits.
    const SHAPE: Shape;
}

/// The fields of a message that allocate, and the message's limits.
#[derive(Debug)]
pub struct Shape {
    /// The message's name in `proto/`.
    pub name: &'static str,
    /// The size of its struct, in bytes.
    pub size: usize,
    /// The most bytes of the encoded message, alone or in another message.
    pub encoded: usize,
    /// The most bytes of memory of the decoded message, if it is decoded alone.
    pub decoded: usize,
    /// The fields that allocate, by field number.
    pub fields: &'static [(u32, Field)],
}

/// The way in which a field allocates.
#[derive(Debug)]
pub enum Field {
    /// A string, or bytes.
    Text,
    /// A list of strings, or of bytes.
    Texts,
    /// A list of varints, packed or not.
    Numbers,
    /// A map of strings.
    Map,
    /// A message, whose struct is part of the outer struct.
    Message(&'static Shape),
    /// A list of messages.
    Messages(&'static Shape),
}

/// The reason why a message is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BoundsError {
    /// The message, or a message in it, is too long.
    #[error("message {name} of {length} bytes: at most {limit} are allowed")]
    Length {
        /// The message's name in `proto/`.
        name: &'static str,
        /// Its encoded bytes.
        length: usize,
        /// The most bytes that are allowed.
        limit: usize,
    },
    /// The message would need too much memory.
    #[error("message {name} needs more than {limit} bytes of memory when it is decoded")]
    Memory {
        /// The message's name in `proto/`.
        name: &'static str,
        /// The most bytes that are allowed.
        limit: usize,
    },
    /// A field has a wrong wire type, or is a group.
    #[error("message {name} has a field with a wrong wire type")]
    WireType {
        /// The message's name in `proto/`.
        name: &'static str,
    },
    /// The bytes are not a protobuf message.
    #[error("malformed message {name}")]
    Malformed {
        /// The message's name in `proto/`.
        name: &'static str,
    },
}

impl Shape {
    /// Creates the shape of a message. Its name determines its limits.
    pub(crate) const fn new(
        name: &'static str,
        size: usize,
        fields: &'static [(u32, Field)],
    ) -> Self {
        let (encoded, decoded) = limits::for_message(name);
        Self { name, size, encoded, decoded, fields }
    }

    /// Checks that a message may be decoded. Returns the most bytes of memory that it needs.
    pub fn check(&self, message: &[u8]) -> Result<usize, BoundsError> {
        let mut memory = MemoryCounter { bytes: self.size, limit: self.decoded };
        match memory.add_message(self, message) {
            Ok(()) => Ok(memory.bytes),
            Err(BoundsError::Memory { limit, .. }) => {
                Err(BoundsError::Memory { name: self.name, limit })
            }
            Err(error) => Err(error),
        }
    }

    fn field(&self, number: u32) -> Option<&'static Field> {
        self.fields.iter().find(|(of, _)| *of == number).map(|(_, field)| field)
    }
}

/// Decodes a message within the limits of its type.
pub fn decode<M: Bounded + Default>(message: bytes::Bytes) -> Result<M, BoundsError> {
    M::SHAPE.check(&message)?;
    M::decode(message).map_err(|_| BoundsError::Malformed { name: M::SHAPE.name })
}

/// A counter of a message's memory.
struct MemoryCounter {
    bytes: usize,
    limit: usize,
}

impl MemoryCounter {
    /// Adds the allocations of a message beyond its struct. No type contains itself, so the types
    /// limit the depth of the recursion.
    fn add_message(&mut self, shape: &Shape, message: &[u8]) -> Result<(), BoundsError> {
        if message.len() > shape.encoded {
            return Err(BoundsError::Length {
                name: shape.name,
                length: message.len(),
                limit: shape.encoded,
            });
        }
        let mut reader = Reader::new(message);
        while let Some((number, value)) = reader.next().map_err(|error| match error {
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
                    // Only the last byte of a varint has no high bit.
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
                // prost reads a map entry as length-delimited, whatever the wire type in its key.
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
