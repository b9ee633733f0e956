//! HPACK (RFC 7541).

mod decoder;
mod encoder;
mod field;
mod huffman;
mod integer;
mod table;

pub(super) use decoder::Decoder;
pub(super) use encoder::Encoder;
pub(super) use field::{Field, Name, PseudoValue};

/// Size of a dynamic table, as HPACK counts it: the initial size, even if the peer allows more.
pub(super) const MAX_TABLE_BYTES: usize = 4096;

#[cfg(test)]
mod tests;
